"""Policy losses that run inside the trainer: what its ``forward_backward`` is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tinker
import torch

from hearth.errors import ConfigError
from hearth.losses.batch import TokenBatch
from hearth.losses.cispo import CISPO
from hearth.losses.clipped import DAPO, GRPO
from hearth.losses.corrections import TIS
from hearth.losses.objective import Objective
from hearth.losses.policy_gradients import DRO, ImportanceSampling
from hearth.losses.sequence import GSPO
from hearth.sdk import TrainingShapeProfile
from training.config.rl import RLConfig
from training.samples.groups import TrainSample


@dataclass(frozen=True)
class BuiltinLoss:
    """A policy loss for the trainer to compute; ``request`` is what it is asked for."""

    name: str
    objective: Objective
    tis: TIS | None
    ratio_to_sampler: bool = False
    """Whether ratios are to the policy that sampled; else to the samples' ``old_logprobs``."""

    def request(
        self, samples: Sequence[TrainSample]
    ) -> tuple[str, list[tinker.Datum], dict[str, float]]:
        """Loss name, datums and loss config; the TIS weight goes into the advantages.

        Needs every sample's ``old_logprobs``.
        """
        weights = _tis_weights(self.tis, samples)
        data: list[tinker.Datum] = []
        for sample, weight in zip(samples, weights, strict=True):
            old = sample.behavior_logprobs if self.ratio_to_sampler else sample.old_logprobs
            assert old is not None, "the built-in losses need old logprobs"
            old = torch.as_tensor(old, dtype=torch.float32)
            advantages = torch.as_tensor(sample.advantage) * weight * sample.mask
            inputs = {
                "target_tokens": sample.datum.loss_fn_inputs["target_tokens"],
                "logprobs": tinker.TensorData.from_torch(old),
                "advantages": tinker.TensorData.from_torch(advantages.float()),
                "weights": sample.datum.loss_fn_inputs["weights"],
            }
            data.append(tinker.Datum(model_input=sample.datum.model_input, loss_fn_inputs=inputs))
        loss_fn, config = _wire_loss(self.objective, self.name)
        return loss_fn, data, config


def _tis_weights(tis: TIS | None, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
    masks = [sample.mask for sample in samples]
    if tis is None:
        return [torch.ones_like(mask) for mask in masks]
    old = [torch.tensor(sample.old_logprobs) for sample in samples]
    batch = TokenBatch.concat(
        old,
        advantages=[0.0] * len(samples),
        mask=masks,
        old_logprobs=old,
        behavior_logprobs=[sample.behavior_logprobs.float() for sample in samples],
    )
    return list(tis.weights(batch).split([mask.numel() for mask in masks]))


def _wire_loss(objective: Objective, policy_loss: str) -> tuple[str, dict[str, float]]:
    """The built-in loss's wire name and its config, whose clips are bounds on the ratio itself."""
    match objective:
        case GRPO():
            high = objective.eps_clip_high
            bounds = _bounds(objective.eps_clip, objective.eps_clip if high is None else high)
            return "ppo", bounds | {"ratio_log_cap": objective.ratio_log_cap}
        case DAPO():
            bounds = _bounds(objective.eps_clip, objective.eps_clip_high)
            bounds["ratio_log_cap"] = objective.ratio_log_cap
            if objective.eps_clip_c is not None:
                bounds["eps_clip_c"] = objective.eps_clip_c
            return "dapo", bounds
        case GSPO():
            bounds = _bounds(objective.clip_ratio_low, objective.clip_ratio_high)
            return "gspo", bounds | {"seq_ratio_log_cap": objective.seq_ratio_log_cap}
        case CISPO():
            bounds = _bounds(objective.eps_low, objective.eps_high)
            return "cispo", bounds | {"ratio_log_cap": objective.ratio_log_cap}
        case DRO():
            return "dro", {"beta": objective.beta}
        case ImportanceSampling():
            return "importance_sampling", {"ratio_log_cap": objective.ratio_log_cap}
        case _:
            raise AssertionError(f"{policy_loss} has no built-in kernel; validate() refuses it")


def _bounds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high}


def refuse_pipelined_trainer(config: RLConfig, shape: TrainingShapeProfile | None) -> None:
    """Check the policy trainer's shape, which is known only once the platform has chosen it.

    Raises:
        ConfigError: the loss is to run inside a trainer that cuts its model into stages.
    """
    if config.runs_builtin_loss and shape is not None and shape.pipeline_parallelism > 1:
        raise ConfigError(
            f"loss_path must be 'client' on {shape.training_shape_version}, got 'builtin': the "
            f"built-in losses need the whole model in one stage, not {shape.pipeline_parallelism}"
        )
