"""Supervised training of an example's own model, before it is trained by reward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def warm_up(
    model: Any, steps: Iterable[int], count: int, loss_of: Callable[[int], torch.Tensor]
) -> None:
    """Take one optimizer step for each of the ``count`` ``steps``, on the loss of that step.

    Muon trains the matrices, AdamW the embeddings and the norms. Rates rise over the first
    twentieth of the steps and then fall to 0.
    """
    named = list(model.named_parameters())
    matrices = [
        parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name
    ]
    rest = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in steps:
        warmth = min(1.0, (step + 1) / (0.05 * count + 1)) * (1 - step / count)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * warmth
            optimizer.zero_grad()
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
