"""Building blocks of reinforcement learning loops, for recipes and for loops of your own."""

from training.platform.infra import Infra, setup_infra
from training.samples.advantages import group_advantages
from training.samples.datums import build_grpo_datums
from training.update.document_losses import make_grpo_loss_fn, make_offpolicy_grpo_loss_fn
from training.update.policy_losses import make_policy_loss_fn

__all__ = [
    "Infra",
    "build_grpo_datums",
    "group_advantages",
    "make_grpo_loss_fn",
    "make_offpolicy_grpo_loss_fn",
    "make_policy_loss_fn",
    "setup_infra",
]
