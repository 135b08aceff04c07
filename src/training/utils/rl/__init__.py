"""Building blocks of reinforcement learning loops, for recipes and for loops of your own."""

from training.utils.rl.advantages import group_advantages
from training.utils.rl.datums import build_grpo_datums
from training.utils.rl.document_losses import make_grpo_loss_fn, make_offpolicy_grpo_loss_fn
from training.utils.rl.infra import Infra, setup_infra
from training.utils.rl.policy_losses import make_policy_loss_fn

__all__ = [
    "Infra",
    "build_grpo_datums",
    "group_advantages",
    "make_grpo_loss_fn",
    "make_offpolicy_grpo_loss_fn",
    "make_policy_loss_fn",
    "setup_infra",
]
