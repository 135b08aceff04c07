"""A platform that takes scripted seconds: trainer, snapshots and deployment of an async run.

The policy that is trained says -0.5 for every token, and ``drift`` less for each optimizer step.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tinker
import torch

from hearth.sdk import SampledCompletion
from hearth.wire.fireworks import Model
from training.platform.run_infra import RunInfra
from training.run.publisher import Publisher
from training.update.policy_losses import LossFunction


@dataclass(frozen=True)
class Seconds:
    """What everything takes; forward and backward once per sample."""

    rollout: float = 10.0
    fwd_bwd: float = 1.0
    optim_step: float = 1.0
    save: float = 2.0
    serve: float = 3.0
    sample: float = 0.0
    """Of a completion that the recipe itself asks for."""


@dataclass
class ScriptedTrainer:
    """The policy's trainer: losses are computed on its logprobs, operations run one by one."""

    seconds: Seconds
    now: Callable[[], float]
    running: Callable[[], int]
    """How many rollouts are under way."""
    base_model: str = "model"
    supports_router_replay: bool = False
    drift: float = 0.0
    """Nats by which an optimizer step makes every token less likely."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    steps: int = 0
    scored: list[tuple[int, list[tinker.Datum]]] = field(default_factory=list)
    """What was only to be scored, and how many steps the weights had then."""
    calls: list[tuple[str, float]] = field(default_factory=list[tuple[str, float]])
    running_at_training: list[int] = field(default_factory=list[int])
    snapshot_name: str = ""
    saved: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: LossFunction, *, temperature: float
    ) -> tinker.ForwardBackwardOutput:
        self.calls.append(("forward_backward", self.now()))
        self.running_at_training.append(self.running())
        async with self.turn:
            await asyncio.sleep(self.seconds.fwd_bwd * len(data))
            loss, metrics = loss_fn(
                data, [torch.tensor(row, requires_grad=True) for row in self._rows(data)]
            )
            loss.backward()
        return tinker.ForwardBackwardOutput("custom", [], metrics)

    async def forward(
        self,
        data: list[tinker.Datum],
        _loss: str,
        _config: dict[str, float],
        *,
        graph: str | None = None,
    ) -> tinker.ForwardBackwardOutput:
        self.calls.append(("forward", self.now()))
        async with self.turn:
            self.scored.append((self.steps, data))
            outputs = [
                {"logprobs": tinker.TensorData(data=row, dtype="float32", shape=[len(row)])}
                for row in self._rows(data)
            ]
        return tinker.ForwardBackwardOutput("cross_entropy", outputs, {})

    async def optim_step(
        self, _params: Any, _normalization: str, *, skip_zero_gradient: bool
    ) -> tinker.OptimStepResponse:
        async with self.turn:
            await asyncio.sleep(self.seconds.optim_step)
            self.steps += 1
        self.calls.append(("optim_step", self.now()))
        return tinker.OptimStepResponse(metrics={"grad_norm": 1.0})

    def save_state(
        self, name: str, *, overwrite: bool, metadata: dict[str, Any]
    ) -> "ScriptedTrainer":
        assert overwrite
        self.saved.append({"name": name, **metadata})
        return self

    def save_weights_for_sampler(self, name: str, _kind: str) -> "ScriptedTrainer":
        self.snapshot_name = name
        return self

    async def result_async(self, _timeout_s: float) -> "ScriptedTrainer":
        """A checkpoint is written at once, and a snapshot too."""
        return self

    async def promote_checkpoint_async(
        self, _job: str, _snapshot: str, name: str, _base: str, *, merge_adapter: bool, card: str
    ) -> Model:
        assert not merge_adapter
        assert "# " in card
        return Model(name=name, kind="HF_BASE_MODEL", source=f"models/{name}")

    def list_checkpoints(self) -> list[str]:
        return [checkpoint["name"] for checkpoint in self.saved]

    def started(self, name: str) -> list[float]:
        """When the calls of an operation were made."""
        return [at for operation, at in self.calls if operation == name]

    def _rows(self, data: Sequence[tinker.Datum]) -> list[list[float]]:
        logprob = -0.5 - self.drift * self.steps
        return [[logprob] * len(datum.loss_fn_inputs["target_tokens"].data) for datum in data]


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


@dataclass
class ScriptedSampler:
    """The recipe's own sampler: samples from what the deployment serves when it is asked."""

    publisher: ScriptedPublisher
    seconds: Seconds
    drift: float = 0.0
    steps: Callable[[int], int] = lambda version: version
    """The optimizer steps that a version has behind it."""
    error: Exception | None = None
    """What every completion fails with."""
    asked: list[tuple[float, Sequence[int], dict[str, Any]]] = field(default_factory=list)
    """Time, prompt and options of every call."""

    async def sample_with_prompt_tokens(
        self, prompt: Sequence[int], *, max_tokens: int, **options: Any
    ) -> list[SampledCompletion]:
        at = asyncio.get_running_loop().time()
        self.asked.append((at, prompt, {"max_tokens": max_tokens, **options}))
        version = len(self.publisher.served)
        await asyncio.sleep(self.seconds.sample)
        if self.error is not None:
            raise self.error
        tokens = [*prompt, *range(100, 100 + max_tokens)]
        logprobs = [-0.5 - self.drift * self.steps(version)] * max_tokens
        return [
            SampledCompletion("", tokens, len(prompt), "length", logprobs, weight_version=version)
        ]


def infra_of(trainer: ScriptedTrainer, folder: Path, **changes: Any) -> RunInfra:
    """What a recipe is provisioned with, of which only the policy's trainer is ever asked."""
    known: dict[str, Any] = {
        **dict.fromkeys(field.name for field in fields(RunInfra)),
        "policy": trainer,
        "policy_client": trainer,
        "trainers": trainer,
        "policy_job_id": "policy",
        "inference_model": "model",
        "deployment_id": "serving",
        "inference_url": "",
        "api_key": "",
        "is_embedded": False,
        "work_dir": folder,
        "serves_older_snapshot": False,
        "served_version": 0,
    }
    return RunInfra(**(known | changes))
