"""A platform that takes scripted seconds: trainer, snapshots and deployment of an async run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import tinker
import torch

from training.utils.rl.platform import RunInfra
from training.utils.rl.policy_losses import LossFunction
from training.utils.rl.publisher import Publisher


@dataclass(frozen=True)
class Seconds:
    """What everything takes; forward and backward once per sample."""

    rollout: float = 10.0
    fwd_bwd: float = 1.0
    optim_step: float = 1.0
    save: float = 2.0
    serve: float = 3.0


@dataclass
class ScriptedTrainer:
    """The policy's trainer: losses are computed on the sampler's own logprobs, nothing is moved."""

    seconds: Seconds
    now: Callable[[], float]
    running: Callable[[], int]
    """How many rollouts are under way."""
    base_model: str = "model"
    calls: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    running_at_training: list[int] = field(default_factory=list[int])
    saved: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def inner(self) -> ScriptedTrainer:
        return self

    async def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: LossFunction, *, temperature: float
    ) -> tinker.ForwardBackwardOutput:
        self.calls.append(("forward_backward", self.now()))
        self.running_at_training.append(self.running())
        await asyncio.sleep(self.seconds.fwd_bwd * len(data))
        loss, metrics = loss_fn(
            data, [torch.tensor(one, requires_grad=True) for one in _rows(data)]
        )
        loss.backward()
        return tinker.ForwardBackwardOutput("custom", [], metrics)

    async def forward(
        self, data: list[tinker.Datum], _loss: str, _config: dict[str, float]
    ) -> tinker.ForwardBackwardOutput:
        self.calls.append(("forward", self.now()))
        outputs = [
            {"logprobs": tinker.TensorData(data=row, dtype="float32", shape=[len(row)])}
            for row in _rows(data)
        ]
        return tinker.ForwardBackwardOutput("cross_entropy", outputs, {})

    async def optim_step(self, _params: Any, _normalization: str) -> tinker.OptimStepResponse:
        await asyncio.sleep(self.seconds.optim_step)
        self.calls.append(("optim_step", self.now()))
        return tinker.OptimStepResponse(metrics={"grad_norm": 1.0})

    def save_state(
        self, name: str, *, overwrite: bool, metadata: dict[str, Any]
    ) -> ScriptedTrainer:
        assert overwrite
        self.saved.append({"name": name, **metadata})
        return self

    async def result_async(self, _timeout_s: float) -> None:
        """A checkpoint is written at once."""

    def list_checkpoints(self) -> list[str]:
        return [one["name"] for one in self.saved]


def _rows(data: Sequence[tinker.Datum]) -> list[list[float]]:
    return [[-0.5] * len(one.loss_fn_inputs["target_tokens"].data) for one in data]


class ScriptedPublisher(Publisher):
    """Snapshots that take their time; number ``fails`` (from 1) is not taken by the deployment."""

    def __init__(self, seconds: Seconds, now: Callable[[], float], *, fails: int = 0) -> None:
        self._seconds = seconds
        self._now = now
        self._fails = fails
        self.saved: list[tuple[str, float]] = []
        self.served: list[tuple[str, float]] = []

    async def save(self, name: str) -> str:
        await asyncio.sleep(self._seconds.save)
        self.saved.append((name, self._now()))
        return name

    async def serve(self, identity: str) -> int:
        await asyncio.sleep(self._seconds.serve)
        if len(self.served) + 1 == self._fails:
            raise ConnectionError("the deployment is gone")
        self.served.append((identity, self._now()))
        return len(self.served)


def infra_of(trainer: ScriptedTrainer, folder: Path, **changes: Any) -> RunInfra:
    """What a recipe is provisioned with, of which only the policy's trainer is ever asked."""
    nobody = cast("Any", None)
    known: dict[str, Any] = {
        "policy": trainer, "reference": None, "policy_profile": None, "policy_job_id": "policy",
        "reference_job_id": None, "inference_model": "model", "deployment_id": "serving",
        "deployment_shape": None, "training_shape_id": None, "ref_training_shape_id": None,
        "max_seq_len": None, "inference_url": "", "api_key": "", "sampler": nobody,
        "syncer": nobody, "tokenizer": nobody, "trainers": nobody, "is_embedded": False,
        "work_dir": folder, "serves_older_snapshot": False, "served_version": 0,
    }  # fmt: skip
    return RunInfra(**(known | changes))
