"""What an update asks of the trainer and of the reference, call by call."""

import asyncio
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import tinker
import torch
from tests.unit.training.platform_script import infra_of
from tests.unit.training.trial_rollouts import group_of

from hearth.telemetry import Stopwatch
from training.recipes.rl_loop import Config
from training.update.kl_control import AdaptiveKL
from training.update.policy_losses import policy_loss
from training.update.policy_update import PolicyUpdate


@dataclass
class NotingTrainer:
    """Writes down what it is asked, and says one logprob for every token."""

    logprob: float = -0.5
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def rows(self, data: list[tinker.Datum]) -> list[list[float]]:
        return [[self.logprob] * datum.model_input.length for datum in data]

    async def forward(
        self, data: list[tinker.Datum], *options: Any, graph: str | None = None
    ) -> tinker.ForwardBackwardOutput:
        self.asked.append(("forward", len(data), *options, graph))
        outputs = [
            {"logprobs": tinker.TensorData(data=row, dtype="float32")} for row in self.rows(data)
        ]
        return tinker.ForwardBackwardOutput("cross_entropy", outputs, {})

    async def forward_backward(
        self, data: list[tinker.Datum], loss: str, options: dict[str, float], *, graph: str
    ) -> tinker.ForwardBackwardOutput:
        old = {value for datum in data for value in datum.loss_fn_inputs["logprobs"].data}
        self.asked.append(("forward_backward", len(data), loss, options, graph, old))
        return tinker.ForwardBackwardOutput(loss, [], {"loss": 1.0})

    async def forward_backward_custom(
        self, data: list[tinker.Datum], loss_fn: Any, *, temperature: float
    ) -> tinker.ForwardBackwardOutput:
        self.asked.append(("custom", len(data), temperature))
        rows = [torch.tensor(row, requires_grad=True) for row in self.rows(data)]
        return tinker.ForwardBackwardOutput("custom", [], loss_fn(data, rows)[1])

    async def optim_step(
        self, params: tinker.AdamParams, normalization: str, *, skip_zero_gradient: bool
    ) -> tinker.OptimStepResponse:
        self.asked.append(("optim_step", params, normalization, skip_zero_gradient))
        return tinker.OptimStepResponse(metrics={"grad_norm": 1.0})


def play(tmp_path: Any, update_options: Any = None, reference: Any = None, **changes: Any) -> Any:
    """A step over one group of two, and the trainer that was asked."""
    trainer, config = NotingTrainer(), Config(temperature=0.7, **{"kl_beta": 0.0, **changes})
    update = PolicyUpdate(
        config,
        infra_of(trainer, tmp_path, reference_client=reference),
        Stopwatch(),
        version=0,
        before_step=lambda _update: trainer.asked.append(("before_step",)),
        **(update_options or {}),
    )

    async def train() -> None:
        for batch in await update.prepare([group_of()]):
            await update.forward_backward(batch, policy_loss(config, batch))
        await update.optim_step()

    asyncio.run(train())
    return update, trainer


ADAM = {"learning_rate": 2e-4, "beta1": 0.8, "beta2": 0.85, "eps": 1e-7}
ADAM |= {"weight_decay": 0.02, "grad_clip_norm": 3.0}


@pytest.mark.parametrize(("steps", "skips"), [("skip", True), ("apply", False)])
def test_a_loss_of_ones_own_is_one_call_and_the_step_has_the_configs_numbers(
    tmp_path, steps, skips
):
    options = {**ADAM, "grad_accumulation_normalization": "num_sequences"}
    update, trainer = play(tmp_path, zero_gradient_steps=steps, **options)

    step = ("optim_step", tinker.AdamParams(**ADAM), "num_sequences", skips)
    assert trainer.asked == [("custom", 2, 0.7), ("before_step",), step]
    assert update.optimizer_steps == 1
    assert [count for count, _ in update.results] == [2, 0]
    assert update.results[1] == (0, {"grad_norm": 1.0})


def test_a_built_in_loss_goes_backward_through_the_pass_that_scored_the_policy(tmp_path):
    update, trainer = play(tmp_path, loss_path="builtin", policy_loss="importance_sampling")

    options = {"ratio_log_cap": 20.0, "temperature": 0.7}
    assert trainer.asked[:-2] == [
        ("forward", 2, "cross_entropy", {"temperature": 0.7}, "old-policy"),
        ("forward_backward", 2, "importance_sampling", options, "old-policy", {-0.5}),
    ]
    assert update.results[0] == (2, {"loss": 1.0})


def test_minibatches_are_scored_together_and_have_a_step_each(tmp_path):
    update, trainer = play(tmp_path, ppo_n_minibatches=2)

    assert [name for name, *_ in trainer.asked] == [
        "forward",
        *["custom", "before_step", "optim_step"] * 2,
    ]
    assert trainer.asked[0] == ("forward", 2, "cross_entropy", {"temperature": 0.7}, None)
    assert update.optimizer_steps == 2


def test_calls_of_one_minibatch_share_its_step(tmp_path):
    _, trainer = play(tmp_path, max_samples_per_fwd_bwd=1)

    assert [name for name, *_ in trainer.asked] == ["custom"] * 2 + ["before_step", "optim_step"]


def test_the_weight_of_the_kl_is_the_controllers_and_adapts_to_the_steps_kl(tmp_path):
    reference = NotingTrainer(logprob=-1.5)
    k3 = math.exp(-1.0) + 1 - 1
    kl = AdaptiveKL(target=k3 / 2, init=0.5)

    update, _ = play(tmp_path, {"kl": kl}, reference, kl_beta=0.25)

    assert reference.asked == [("forward", 2, "cross_entropy", {"temperature": 0.7}, None)]
    assert {value for sample in update.groups[0].flat() for value in sample.ref_logprobs} == {-1.5}
    assert update.results[1] == (0, {"grad_norm": 1.0, "kl_beta": 0.5})
    assert update.results[0][1]["ref_kl"] == pytest.approx(k3)
    assert kl.coefficient == pytest.approx(0.5 * 1.02)
