"""AdamW or Muon over an accumulated gradient: normalize, clip, step; nothing of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hearth.errors import ConfigError, EngineError, NumericsError
from hearth.losses import GradientCounts
from hearth.wire.tinker import AdamParams, Normalization

_MASTER = "master"
_WHOLE = frozenset({_MASTER, "exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2"})
"""What has the shape of its parameter."""
_STATE: Mapping[str, Collection[str]] = {
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
    "adamw_8bit": {"step", "state1", "state2", "absmax1", "absmax2"},
    "muon": {"momentum_buffer"},
}
"""What a checkpoint has of each parameter, by optimizer."""


class Optimizer:
    """AdamW with decoupled weight decay (arXiv:1711.05101) for some parameters.

    Those named in ``matrices`` are updated by Muon (arXiv:2502.16982) instead, whose updates have
    the size of AdamW's, so that one learning rate and one weight decay serve both. ``is_8bit`` has
    AdamW's moments in eight bits (arXiv:2110.02861), by bitsandbytes.

    Parameters below float32 have a float32 master copy: their gradients are added up in float32
    as the backward pass delivers them, and a step rounds the master into the parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        matrices: Collection[str] = (),
        *,
        is_8bit: bool = False,
    ) -> None:
        self.counts = GradientCounts()
        """Tokens and sequences whose gradient is in the accumulated one."""
        self.num_passes = 0
        """Backward passes since the last step; 0 means that no gradient has accumulated."""
        self._parameters = dict(parameters)
        self._matrices = frozenset(matrices)
        self._is_8bit = is_8bit
        self._masters = {name: _make_master(weight) for name, weight in parameters.items()}
        pairs = [(weight, self._masters[name]) for name, weight in parameters.items()]
        self._hooks = [
            weight.register_post_accumulate_grad_hook(_make_gradient_hook(master))
            for weight, master in pairs
            if master is not weight
        ]
        self.reset()

    def reset(self) -> None:
        """Drop moments and gradient; copy the parameters into their masters."""
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                self._masters[name].copy_(parameter)
        matrices = {name: self._masters[name] for name in self._masters if name in self._matrices}
        others = [self._masters[name] for name in self._masters if name not in matrices]
        make_adamw = _make_8bit_adamw if self._is_8bit else _make_adamw
        self._adam = make_adamw(others) if others else None
        self._muon = self._make_muon(list(matrices.values())) if matrices else None
        self.clear_gradient()

    def clear_gradient(self) -> None:
        """Drop the accumulated gradient and its counts."""
        for parameter in (*self._parameters.values(), *self._masters.values()):
            parameter.grad = None
        self.counts = GradientCounts()
        self.num_passes = 0

    def record_pass(self, counts: GradientCounts) -> None:
        """Count a backward pass that has added a gradient with these counts."""
        self.counts += counts
        self.num_passes += 1

    def step(
        self,
        adam: AdamParams,
        normalization: Normalization = "none",
        *,
        skip_zero_gradient: bool = False,
    ) -> dict[str, float]:
        """Divide the gradient, clip its L2 norm, apply it, and clear it; returns metrics.

        ``grad_norm`` is the norm after the division and before the clip. Without an accumulated
        gradient nothing changes and ``skipped`` is 1. A gradient of zeros is a gradient, by which
        moments and weight decay act, unless ``skip_zero_gradient`` drops it likewise.

        Raises:
            NumericsError: the gradient is not finite; it is dropped and no parameter changes.
        """
        denominator = self.counts.denominator(normalization)
        metrics = {
            "lr": adam.learning_rate,
            "denominator": float(denominator),
            "grad_norm": 0.0,
            "grad_norm_post_clip": 0.0,
            "num_loss_tokens": float(self.counts.tokens),
            "num_sequences": float(self.counts.sequences),
            "skipped": 0.0,
        }
        if self.num_passes == 0:
            return metrics | {"skipped": 1.0}
        gradients = self._collect_gradients()
        norm = self._compute_norm(gradients) / denominator
        if not math.isfinite(norm):
            self.clear_gradient()
            raise NumericsError(
                f"gradient must be finite, got norm {norm}: the step was refused and the "
                "gradient dropped; weights and optimizer are unchanged"
            )
        if norm == 0 and skip_zero_gradient:
            self.clear_gradient()
            return metrics | {"skipped": 1.0}
        is_clipped = 0 < adam.grad_clip_norm < norm
        metrics["grad_norm"] = norm
        metrics["grad_norm_post_clip"] = adam.grad_clip_norm if is_clipped else norm
        scale = (adam.grad_clip_norm / norm if is_clipped else 1.0) / denominator
        if scale != 1.0:
            torch._foreach_mul_(gradients, scale)
        self._apply(adam)
        self.clear_gradient()
        return metrics

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments, step counts and masters, by ``kind/parameter name``."""
        tensors: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            for kind, value in self._find_state(name).items():
                if kind in self._kept_of(name):
                    tensors[f"{kind}/{name}"] = torch.as_tensor(value).detach()
            if master is not self._parameters[name]:
                tensors[f"master/{name}"] = master.detach()
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of ``state_tensors``; drops the accumulated gradient.

        Raises:
            EngineError: a tensor belongs to no parameter here, has another shape, or is another
                optimizer's.
        """
        self.reset()
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            master = self._masters.get(name)
            if kind != _MASTER and kind not in self._kept_of(name):
                raise EngineError(
                    f"optimizer state must have {sorted(self._kept_of(name))}, got {key!r}: go on "
                    "with the optimizer that has written the checkpoint"
                )
            if master is None or (kind in _WHOLE and value.shape != master.shape):
                raise EngineError(
                    f"optimizer state must fit the model's parameters, got {key!r} "
                    f"{list(value.shape)}"
                )
            if kind == _MASTER:
                master.data.copy_(value)
                continue
            state = self._find_state(name)
            if self._is_8bit and not state:
                # It has constants that no checkpoint keeps.
                adamw: Any = self._adam
                adamw.init_state(adamw.param_groups[0], master, 0, 0)
            is_count = self._is_8bit and kind == "step"
            state[kind] = int(value) if is_count else value.to(master.device, copy=True)

    def close(self) -> None:
        """Remove the hooks and the gradient from the parameters."""
        for hook in self._hooks:
            hook.remove()
        self.clear_gradient()

    def _collect_gradients(self) -> list[Tensor]:
        """All gradients; a parameter that the loss did not reach has zeros."""
        gradients: list[Tensor] = []
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            gradients.append(master.grad)
        return gradients

    def _compute_norm(self, gradients: Sequence[Tensor]) -> float:
        """The L2 norm of all gradients."""
        return float(torch.nn.utils.get_total_norm(gradients))

    def _make_muon(self, matrices: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Muon for float32 masters that are matrices."""
        return torch.optim.Muon(matrices, lr=0.0, adjust_lr_fn="match_rms_adamw")

    def _kept_of(self, name: str) -> Collection[str]:
        """What a checkpoint has of a parameter, its master aside."""
        adamw = "adamw_8bit" if self._is_8bit else "adamw"
        return _STATE["muon" if name in self._matrices else adamw]

    def _find_state(self, name: str) -> dict[str, Any]:
        """What is kept of a parameter; empty before the first step."""
        rule = self._muon if name in self._matrices else self._adam
        assert rule is not None, "every parameter has one"
        return rule.state[self._masters[name]]

    def _apply(self, adam: AdamParams) -> None:
        given: dict[str, Any] = {"lr": adam.learning_rate, "weight_decay": adam.weight_decay}
        if self._muon is not None:
            _step(self._muon, given)
        if self._adam is not None:
            _step(self._adam, given | {"betas": (adam.beta1, adam.beta2), "eps": adam.eps})
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])


def _make_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    is_fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    return torch.optim.AdamW(parameters, lr=0.0, fused=is_fused)


def _make_8bit_adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW by bitsandbytes; tensors of fewer than 4096 numbers have moments in float32.

    Raises:
        ConfigError: it is not installed.
    """
    # While another thread imports peft, bitsandbytes is hidden; this import waits for that.
    import hearth.models.peft_import  # noqa: F401 - see above

    try:
        import bitsandbytes  # an extra, and slow to import
    except ImportError:
        raise ConfigError(
            "optimizer must be one that is installed, got 'adamw_8bit' without bitsandbytes: "
            "pip install 'hearth-rl[bitsandbytes]' where trainers run"
        ) from None
    adamw: Any = bitsandbytes.optim.AdamW8bit
    return adamw(parameters, lr=0.0)


def _step(rule: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    for group in rule.param_groups:
        group.update(given)
    rule.step()


def _make_master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float())


def _make_gradient_hook(master: nn.Parameter) -> Callable[[Tensor], None]:
    def move(parameter: Tensor) -> None:
        gradient = parameter.grad
        parameter.grad = None
        if gradient is not None:
            master.grad = gradient.float() if master.grad is None else master.grad + gradient

    return move
