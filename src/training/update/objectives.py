"""From a recipe's config and its groups to what the two loss paths take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tinker
import torch

from hearth.losses.batch import TokenBatch
from hearth.losses.cispo import CISPO
from hearth.losses.clipped import DAPO, GRPO
from hearth.losses.corrections import TIS
from hearth.losses.dro import DRO
from hearth.losses.importance import ImportanceSampling
from hearth.losses.objective import Objective
from hearth.losses.sequence import GSPO
from training.samples.groups import PromptGroup, TrainSample


@dataclass(frozen=True)
class BuiltinCall:
    """Arguments of ``forward_backward`` for a loss that runs inside the trainer."""

    loss_fn: str
    data: list[tinker.Datum]
    loss_fn_config: dict[str, float]


def samples_of(groups: Sequence[PromptGroup]) -> list[TrainSample]:
    """All samples of some groups, in order."""
    return [one for group in groups for one in group.flat()]


def old_rows(samples: Sequence[TrainSample]) -> list[Sequence[float]] | None:
    """Every sample's old logprobs, or None when nobody scored them."""
    rows = [sample.old_logprobs for sample in samples if sample.old_logprobs is not None]
    return rows if len(rows) == len(samples) else None


def ref_rows(samples: Sequence[TrainSample]) -> list[Sequence[float]] | None:
    """Every sample's reference logprobs, or None when there is no reference."""
    rows = [sample.ref_logprobs for sample in samples if sample.ref_logprobs is not None]
    return rows if len(rows) == len(samples) else None


def builtin_call(
    objective: Objective, policy_loss: str, tis: TIS | None, samples: Sequence[TrainSample]
) -> BuiltinCall:
    """The same objective for the trainer's own loss; the TIS weight goes into the advantages.

    Needs every sample's ``old_logprobs``.
    """
    weights = _tis_weights(tis, samples)
    data: list[tinker.Datum] = []
    for sample, weight in zip(samples, weights, strict=True):
        assert sample.old_logprobs is not None, "the built-in losses need old logprobs"
        mask = sample.datum.loss_fn_inputs["weights"]
        advantages = torch.as_tensor(sample.advantage) * weight * mask.to_torch()
        inputs = {
            "target_tokens": sample.datum.loss_fn_inputs["target_tokens"],
            "logprobs": tinker.TensorData(data=list(sample.old_logprobs), dtype="float32"),
            "advantages": tinker.TensorData.from_torch(advantages.float()),
            "weights": mask,
        }
        data.append(tinker.Datum(model_input=sample.datum.model_input, loss_fn_inputs=inputs))
    loss_fn, config = _wire_loss(objective, policy_loss)
    return BuiltinCall(loss_fn, data, config)


def _tis_weights(tis: TIS | None, samples: Sequence[TrainSample]) -> list[torch.Tensor]:
    masks = [sample.datum.loss_fn_inputs["weights"].to_torch().float() for sample in samples]
    if tis is None:
        return [torch.ones_like(mask) for mask in masks]
    old = [torch.tensor(sample.old_logprobs) for sample in samples]
    batch = TokenBatch.concat(
        old,
        advantages=[0.0] * len(samples),
        mask=masks,
        old_logprobs=old,
        behavior_logprobs=[torch.tensor(sample.behavior_logprobs) for sample in samples],
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
