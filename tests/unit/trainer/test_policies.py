"""Several LoRA policies on one base: each is as it would be alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hearth.errors import NotFoundError, RequestError
from hearth.models.lora import LoraOptions
from hearth.trainer.engine import TrainerEngine
from hearth.wire.tinker import AdamParams

RUNS = 6


def _options(run: int) -> LoraOptions:
    return LoraOptions(rank=(2, 4, 8)[run % 3], seed=run, train_unembed=run % 2 == 0)


def _train(engine: TrainerEngine, model_id: str, run: int, step: int, random_data) -> list:
    data = random_data(count=4, seed=100 * run + step, longest=20)
    scored = engine.forward(model_id, data, graph="same")
    trained = engine.forward_backward(model_id, data, graph="same")
    engine.optim_step(model_id, AdamParams(learning_rate=1e-2))
    return [scored.values.tobytes(), trained.values.tobytes(), trained.metrics["loss:sum"]]


@pytest.mark.slow
def test_policies_that_take_turns_are_bit_for_bit_as_each_alone(make_engine, random_data) -> None:
    together = make_engine(max_policies=RUNS)
    models = [together.create_model(_options(run)) for run in range(RUNS)]
    found: list[list] = [[] for _ in range(RUNS)]
    for step in range(3):
        for run in range(RUNS):
            found[run].append(_train(together, models[run], run, step, random_data))

    for run in range(RUNS):
        alone = make_engine()
        model_id = alone.create_model(_options(run))
        assert found[run] == [_train(alone, model_id, run, step, random_data) for step in range(3)]
        ours = together._residents.get(models[run]).tensors()
        theirs = alone._residents.get(model_id).tensors()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_policies_share_the_base_weights_and_own_their_adapters(make_engine) -> None:
    engine = make_engine(max_policies=2)
    first, second = (
        engine._residents.get(engine.create_model(LoraOptions(rank=2, seed=seed)))
        for seed in (0, 1)
    )
    frozen = engine._residents.get(engine.create_model(is_frozen=True))

    def places(model, wanted: Callable[[str], bool]) -> set[int]:
        named = model.loaded.module.named_parameters()
        return {parameter.data_ptr() for name, parameter in named if wanted(name)}

    base = places(frozen, lambda name: True)
    for model in (first, second):
        assert places(model, lambda name: ".lora_" not in name) == base
    adapters = [places(model, lambda name: ".lora_" in name) for model in (first, second)]
    assert adapters[0]
    assert not adapters[0] & adapters[1]


@pytest.mark.slow
def test_a_removed_policy_leaves_the_others_and_makes_room(make_engine, random_data) -> None:
    engine = make_engine(max_policies=2)
    first, second = (engine.create_model(LoraOptions(rank=2, seed=seed)) for seed in (0, 1))
    data = random_data(count=2, longest=20)
    before = engine.forward(second, data).values.tobytes()
    with pytest.raises(RequestError, match="at most 2 policies, got one more"):
        engine.create_model(LoraOptions(rank=2))

    engine.unload(first)

    engine.create_model(LoraOptions(rank=2, seed=9))
    assert engine.forward(second, data).values.tobytes() == before
    with pytest.raises(NotFoundError):
        engine.forward(first, data)


@pytest.mark.slow
def test_a_client_that_says_who_it_is_replaces_its_own_policy_alone(make_engine) -> None:
    engine = make_engine(max_policies=3)
    unnamed = engine.create_model(LoraOptions(rank=2))
    first = engine.create_model(LoraOptions(rank=2), owner="a")
    other = engine.create_model(LoraOptions(rank=2), owner="b")

    again = engine.create_model(LoraOptions(rank=2), owner="a")

    known = {model.model_id for model in engine._residents.find_policies()}
    assert known == {unnamed, other, again}
    assert first not in known


def test_among_several_policies_none_trains_all_weights(make_engine) -> None:
    with pytest.raises(RequestError, match=r"rank must be >= 1 on a trainer of 2 policies, got 0"):
        make_engine(max_policies=2).create_model(None)
