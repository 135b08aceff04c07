"""AdamW over an accumulated gradient: normalize, clip, step. It knows nothing of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hearth.errors import EngineError, NumericsError
from hearth.losses import GradientCounts
from hearth.wire.tinker import AdamParams, Normalization


class Optimizer:
    """AdamW with decoupled weight decay (arXiv:1711.05101) for some parameters.

    Parameters below float32 have a float32 master copy: their gradients are added up in float32
    as the backward pass delivers them, and a step rounds the master into the parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.counts = GradientCounts()
        """Tokens and sequences whose gradient is in the accumulated one."""
        self.num_passes = 0
        """Backward passes since the last step; 0 means that no gradient has accumulated."""
        self._parameters = dict(parameters)
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
        is_fused = all(master.device.type in ("cpu", "cuda") for master in self._masters.values())
        self._adam = torch.optim.AdamW(list(self._masters.values()), lr=0.0, fused=is_fused)
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
        """Divide the gradient, clip its L2 norm, apply AdamW, and clear it; returns metrics.

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
            for kind, value in self._adam.state[master].items():
                tensors[f"{kind}/{name}"] = value.detach()
            if master is not self._parameters[name]:
                tensors[f"master/{name}"] = master.detach()
        return tensors

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of ``state_tensors``; drops the accumulated gradient.

        Raises:
            EngineError: a tensor belongs to no parameter here, or has another shape.
        """
        self.reset()
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            master = self._masters.get(name)
            if master is None or (kind != "step" and value.shape != master.shape):
                raise EngineError(
                    f"optimizer state must fit the model's parameters, got {key!r} "
                    f"{list(value.shape)}"
                )
            if kind == "master":
                master.data.copy_(value)
            else:
                self._adam.state[master][kind] = value.to(master.device, copy=True)

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

    def _apply(self, adam: AdamParams) -> None:
        for group in self._adam.param_groups:
            group["lr"] = adam.learning_rate
            group["betas"] = (adam.beta1, adam.beta2)
            group["eps"] = adam.eps
            group["weight_decay"] = adam.weight_decay
        self._adam.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])


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
