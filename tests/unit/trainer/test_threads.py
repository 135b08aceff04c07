"""The number of threads is a matter of speed: an update has the same bits whatever it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.trainer.conftest import MakePolicy, Policy

from hearth.threads import ThreadBudget
from hearth.wire.tinker import AdamParams, DatumRecord

pytestmark = pytest.mark.slow

RandomData = Callable[..., list[DatumRecord]]


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def large(random_data: RandomData) -> Sequence[DatumRecord]:
    """Enough tokens for every loop to be cut among threads."""
    return random_data(count=60, longest=90)


def update(policy: Policy, data: Sequence[DatumRecord]) -> dict[str, bytes]:
    """The weights and moments after two updates, bit by bit."""
    for _ in range(2):
        policy.forward_backward(data, "cross_entropy", {})
        policy.optim_step(AdamParams(learning_rate=1e-2, grad_clip_norm=1.0))
    policy.save_state("after", overwrite=True)
    files = sorted((policy.checkpoints / "after" / "data").glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.mark.parametrize("threads", [2, 3])
def test_an_update_has_the_same_bits_on_any_number_of_threads(
    make_policy: MakePolicy, random_data: RandomData, threads: int
) -> None:
    data = large(random_data)
    torch.set_num_threads(1)
    alone = update(make_policy(), data)
    torch.set_num_threads(threads)

    assert update(make_policy(), data) == alone


def test_an_update_has_the_same_bits_while_its_share_of_threads_changes(
    make_policy: MakePolicy, random_data: RandomData
) -> None:
    data = large(random_data)
    torch.set_num_threads(1)
    alone = update(make_policy(), data)
    budget = ThreadBudget(2)
    trainer, sampler = budget.add_member(), budget.add_member()
    assert sampler.number is not None
    stop = threading.Event()
    seen: set[int] = set()

    def come_and_go() -> None:
        while not stop.wait(1e-4):
            for computes in (True, False):
                budget.note(sampler.number or 0, computes=computes)
                seen.add(budget.share(trainer.number))

    other = threading.Thread(target=come_and_go, daemon=True)
    other.start()
    try:
        trainer.note("forward_backward")
        found = update(make_policy(), data)
    finally:
        stop.set()
        other.join()
        trainer.note("idle")

    assert seen == {1, 2}
    assert found == alone
