"""One update of the policy: losses, KL, turn credit, optimizer steps."""

from training.update.builtin_loss import refuse_pipelined_trainer
from training.update.policy_losses import StepBatch, policy_loss
from training.update.policy_update import PolicyUpdate

__all__ = ["PolicyUpdate", "StepBatch", "policy_loss", "refuse_pipelined_trainer"]
