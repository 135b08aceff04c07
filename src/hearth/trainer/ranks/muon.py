"""Muon for matrices of which each rank has some rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

_MOMENTUM = 0.95
"""As in ``torch.optim.Muon``."""


class ShardedMuon(torch.optim.Optimizer):
    """``torch.optim.Muon`` with Nesterov's momentum, whose buffers are sharded as the weights are.

    An update is orthogonal as a whole, so every rank gathers and computes each one on ``device``,
    one matrix at a time, and applies its own rows. All ranks step together.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], device: torch.device) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": 0.0})
        self._device = device

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step by the parameters' gradients; ``closure`` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: DTensor, lr: float, weight_decay: float) -> None:
        state = self.state[cast("Tensor", parameter)]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, momentum = _part(parameter.grad), _part(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        whole = _gather(gradient.lerp(momentum, _MOMENTUM), parameter).to(self._device)
        own = _part(parameter)
        own.mul_(1 - lr * weight_decay).add_(_share(_orthogonalize(whole, lr), parameter))


def _orthogonalize(update: Tensor, lr: float) -> Tensor:
    """What a step of Muon with this momentum adds to a whole matrix."""
    change = nn.Parameter(torch.zeros_like(update))
    change.grad = update
    muon = torch.optim.Muon(
        [change],
        lr=lr,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn="match_rms_adamw",
    )
    muon.step()
    return change.detach()


def _part(tensor: Any) -> Tensor:
    """This rank's rows, on the same memory."""
    return cast("DTensor", tensor.detach()).to_local()


def _gather(part: Tensor, like: DTensor) -> Tensor:
    """The whole matrix of which each rank has a part, sharded as ``like``."""
    sharded = DTensor.from_local(
        part,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return sharded.full_tensor()


def _share(whole: Tensor, like: DTensor) -> Tensor:
    """This rank's rows of a matrix that all ranks have whole."""
    everywhere = [Replicate()] * like.device_mesh.ndim
    copies = DTensor.from_local(whole, like.device_mesh, everywhere, run_check=False)
    return copies.redistribute(placements=like.placements).to_local().to(_part(like).device)
