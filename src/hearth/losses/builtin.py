"""The trainer's built-in losses: wire names, config keys and datum fields -> objectives.

Names and keys are those of the wire protocol; ``clip_low_threshold`` and ``clip_high_threshold``
are bounds on the ratio itself (0.8, 1.2), not distances from 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses.batch import TokenBatch
from hearth.losses.catalog import evaluate
from hearth.losses.cispo import CISPO
from hearth.losses.clipped import DAPO, GRPO
from hearth.losses.objective import Objective, ObjectiveOutput
from hearth.losses.policy_gradients import DRO, CrossEntropy, ImportanceSampling, Reinforce
from hearth.losses.sequence import GSPO

_MASK_INPUTS = ("weights", "loss_mask")


@dataclass(frozen=True)
class BuiltinObjective:
    """A built-in loss with its options and the datum fields that it reads."""

    name: str
    """Its wire name."""
    objective: Objective
    """The options."""
    required_inputs: tuple[str, ...]
    """Fields that a datum must have beside ``target_tokens``."""
    optional_inputs: tuple[str, ...]
    """Fields that a datum may have; any other is an error."""

    def make_batch(
        self,
        policy_logprobs: Sequence[Tensor],
        inputs: Sequence[Mapping[str, Tensor]],
        datum_ids: Sequence[int] | None = None,
    ) -> TokenBatch:
        """The flat batch of some datums: one tensor of logprobs and one mapping of fields each.

        For ``cross_entropy`` a token counts by its weight (``weights``, else ``loss_mask``, else
        0). For the policy losses the ratio is to ``logprobs``, and the mask is ``weights`` or
        ``loss_mask``; without either, a token of advantage 0 is inactive, because clients fold
        the mask into the advantages.

        Raises:
            ConfigError: a field is missing, unknown, or not as long as the datum's targets.
        """
        names = list(range(len(inputs))) if datum_ids is None else list(datum_ids)
        logprobs = [_flatten(values) for values in policy_logprobs]
        whole = torch.cat(logprobs) if logprobs else torch.zeros(0)
        lengths = torch.tensor([values.numel() for values in logprobs], dtype=torch.int64)
        joined = _join_inputs(logprobs, inputs)
        if joined is not None:
            fields = [self._check_inputs(names[0], whole, joined)]
        else:
            datums = zip(names, logprobs, inputs, strict=True)
            fields = [self._check_inputs(*datum) for datum in datums]
        has_logprobs = ["logprobs" in field for field in fields]
        if any(has_logprobs) and not all(has_logprobs):
            lacking = names[has_logprobs.index(False)]
            raise ConfigError(f"datum {lacking}: logprobs must be given in all datums or in none")

        def join(name: str) -> Tensor:
            return torch.cat([field[name] for field in fields]) if fields else whole

        sampled = join("logprobs") if any(has_logprobs) else None
        is_behavior = isinstance(self.objective, Reinforce)
        return TokenBatch(
            policy_logprobs=whole,
            advantages=join("advantages"),
            mask=join("mask"),
            segment_ids=torch.arange(len(logprobs)).repeat_interleave(lengths).to(whole.device),
            num_samples=len(logprobs),
            old_logprobs=None if is_behavior else sampled,
            behavior_logprobs=sampled if is_behavior else None,
            datum_ids=names,
        )

    def evaluate(self, batch: TokenBatch) -> ObjectiveOutput:
        """Raw loss per token [T] and metrics; see ``policy_loss_per_token``."""
        return evaluate(self.objective, batch)

    def _check_inputs(
        self, datum: int, logprobs: Tensor, inputs: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """``advantages`` and ``mask``, and of a policy loss ``logprobs`` where they are given."""
        given = {name: _flatten(value) for name, value in inputs.items() if name != "target_tokens"}
        required, known = self.required_inputs, self.required_inputs + self.optional_inputs
        if not (given.keys() <= set(known) and given.keys() >= set(required)):
            raise ConfigError(
                f"datum {datum}: loss_fn_inputs of {self.name} must hold "
                f"{list(required)} and may hold {list(self.optional_inputs)}, "
                f"got {sorted(given)}"
            )
        for name, value in given.items():
            if value.numel() != logprobs.numel():
                raise ConfigError(
                    f"datum {datum}: {name} must have {logprobs.numel()} entries as target_tokens, "
                    f"got {value.numel()}"
                )
        mask = next((given[name] for name in _MASK_INPUTS if name in given), None)
        if isinstance(self.objective, CrossEntropy):
            given, mask = {"advantages": torch.zeros_like(logprobs) if mask is None else mask}, None
        return given | {"mask": given["advantages"].ne(0).float() if mask is None else mask}


def _join_inputs(
    logprobs: Sequence[Tensor], inputs: Sequence[Mapping[str, Tensor]]
) -> Mapping[str, Tensor] | None:
    """All datums' fields end to end; None where names or lengths differ between datums."""
    if not inputs or len(logprobs) != len(inputs):
        return None
    names = inputs[0].keys()
    for values, fields in zip(logprobs, inputs, strict=True):
        size = values.numel()
        if fields.keys() != names or any(field.numel() != size for field in fields.values()):
            return None
    return {name: torch.cat([_flatten(fields[name]) for fields in inputs]) for name in names}


def _flatten(values: Tensor) -> Tensor:
    # Most tensors are flat already, and this runs several times per datum.
    return values if values.dim() == 1 else values.reshape(-1)


@dataclass(frozen=True)
class _Key:
    """A config key: the option it sets, and the conversion of its number to the option's."""

    option: str
    convert: Callable[[float], float] = float


_LOG_CAP = {"ratio_log_cap": _Key("ratio_log_cap")}


def _ratio_bounds(low: str, high: str) -> dict[str, _Key]:
    return {
        "clip_low_threshold": _Key(low, lambda bound: 1 - bound),
        "clip_high_threshold": _Key(high, lambda bound: bound - 1),
    }


_EPS_CLIP = _ratio_bounds("eps_clip", "eps_clip_high") | _LOG_CAP
_POLICY_INPUTS = ("logprobs", "advantages")

_BUILTINS: Mapping[str, tuple[BuiltinObjective, Mapping[str, _Key]]] = {
    builtin.name: (builtin, keys)
    for builtin, keys in (
        (BuiltinObjective("cross_entropy", CrossEntropy(), (), _MASK_INPUTS), {}),
        (
            BuiltinObjective(
                "importance_sampling", ImportanceSampling(), _POLICY_INPUTS, _MASK_INPUTS
            ),
            _LOG_CAP,
        ),
        (BuiltinObjective("ppo", GRPO(kl_beta=0.0), _POLICY_INPUTS, _MASK_INPUTS), _EPS_CLIP),
        (
            BuiltinObjective("cispo", CISPO(), _POLICY_INPUTS, _MASK_INPUTS),
            _ratio_bounds("eps_low", "eps_high") | _LOG_CAP,
        ),
        (BuiltinObjective("dro", DRO(), _POLICY_INPUTS, _MASK_INPUTS), {"beta": _Key("beta")}),
        (
            BuiltinObjective("dapo", DAPO(), _POLICY_INPUTS, _MASK_INPUTS),
            _EPS_CLIP | {"eps_clip_c": _Key("eps_clip_c")},
        ),
        (
            BuiltinObjective("gspo", GSPO(), _POLICY_INPUTS, _MASK_INPUTS),
            _ratio_bounds("clip_ratio_low", "clip_ratio_high")
            | {"seq_ratio_log_cap": _Key("seq_ratio_log_cap")},
        ),
        (
            BuiltinObjective(
                "reinforce", Reinforce(), ("advantages",), ("logprobs", *_MASK_INPUTS)
            ),
            _LOG_CAP,
        ),
    )
}

BUILTIN_LOSSES = tuple(_BUILTINS)
"""Names that ``builtin_objective`` knows."""


def builtin_objective(
    loss_fn: str, loss_fn_config: Mapping[str, float] | None = None
) -> BuiltinObjective:
    """The built-in loss of a wire name with its config applied.

    Raises:
        ConfigError: the name or a config key is unknown (the message lists the known ones), or a
            value is no finite number or breaks the option's rule.
    """
    if loss_fn not in _BUILTINS:
        raise ConfigError(f"loss_fn must be one of {', '.join(BUILTIN_LOSSES)}, got {loss_fn!r}")
    builtin, keys = _BUILTINS[loss_fn]
    changes: dict[str, float] = {}
    for key, value in (loss_fn_config or {}).items():
        if key not in keys:
            known = ", ".join(keys) or "none"
            raise ConfigError(
                f"loss_fn_config of {loss_fn} must use known keys ({known}), got {key!r}"
            )
        if isinstance(value, bool) or not _is_finite(value):
            raise ConfigError(f"loss_fn_config.{key} must be a finite number, got {value!r}")
        changes[keys[key].option] = keys[key].convert(float(value))
    objective = replace(builtin.objective, **changes)
    objective.validate()
    return replace(builtin, objective=objective)


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
