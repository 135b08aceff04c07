"""A run over a connection to its trainer that loses questions and answers: each operation once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from hearth.errors import BusyError
from hearth.sync.store import MemorySnapshotStore
from hearth.tinker.bases import BaseLostError, ask
from hearth.tinker.journal import RunJournal
from hearth.tinker.records import RunFacts
from hearth.tinker.runs import RunOperation, TinkerRun
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions
from hearth.trainer.service import create_app
from hearth.wire.room import Room
from hearth.wire.tinker import LoraSpec
from training.quickstart import MODEL

STEPS = 12


class Connection:
    """A trainer, and the way to it: a ``share`` of its questions or answers are lost."""

    def __init__(self, folder: Path, share: float, seed: int = 0) -> None:
        self.name = str(MODEL)
        self.engine = TrainerEngine(
            MODEL,
            snapshots=MemorySnapshotStore(),
            checkpoint_dir=folder,
            options=TrainerOptions(max_policies=2),
        )
        self.app = create_app(self.engine)
        self.share = share
        self.lost = 0
        self._chance = random.Random(seed)

    async def start_trainer(self) -> None:
        """It runs."""

    async def start_deployment(self) -> None:
        """It is not asked for anything."""

    async def ask_trainer(self, path: str, content: bytes) -> dict[str, Any]:
        fate = self._chance.random()
        if fate < self.share / 2:
            self.lost += 1
            raise BaseLostError("the question was lost")
        answer = await ask(self.app, f"/api/v1/{path}", content)
        if fate < self.share:
            self.lost += 1
            raise BaseLostError("the answer was lost")
        return answer


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Any]:
    made: list[Connection] = []

    def run(name: str, share: float, seed: int = 0) -> Connection:
        made.append(Connection(tmp_path / name, share, seed))
        return made[-1]

    yield run
    for connection in made:
        connection.engine.close()


async def finish(
    _run: TinkerRun, _operation: RunOperation, answer: dict[str, Any]
) -> dict[str, Any]:
    return {"metrics": answer.get("metrics")}


def make_run(connection: Connection, folder: Path, room: int = 2**20) -> TinkerRun:
    facts = RunFacts(
        owner="a", session_id="s", base_model=connection.name, lora=LoraSpec(rank=4, seed=3)
    )
    held = Room(room, "bytes of operations")
    return TinkerRun("s:train:0", facts, connection, RunJournal(folder), finish, held)  # type: ignore[arg-type]


def make_operations() -> list[RunOperation]:
    made: list[RunOperation] = []
    for step in range(STEPS):
        tokens = [5 + (step + place) % 200 for place in range(12)]
        datum = {
            "model_input": {"chunks": [{"tokens": tokens[:-1]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": tokens[1:], "dtype": "int64"},
                "weights": {"data": [1.0] * 11, "dtype": "float32"},
            },
        }
        given = {"forward_backward_input": {"data": [datum]}, "tensor_encoding": "base64"}
        made.append(RunOperation("forward_backward", orjson.dumps(given), 2 * step + 1))
        adam = {"adam_params": {"learning_rate": 0.01}}
        made.append(RunOperation("optim_step", orjson.dumps(adam), 2 * step + 2))
    return made


async def collect(run: TinkerRun) -> list[bytes | None]:
    return [await run.wait(number, 60) for number in range(1, 2 * STEPS + 1)]


@pytest.mark.slow
async def test_what_is_lost_on_the_way_is_asked_again_and_done_once(connect, tmp_path) -> None:
    results = []
    for share, seed in ((0.0, 0), (0.12, 1), (0.12, 2)):
        connection = connect(f"trainer-{seed}", share, seed)
        run = make_run(connection, tmp_path / f"run-{seed}")
        run.begin()
        for operation in make_operations():
            run.accept(operation)
            await asyncio.sleep(0)
        results.append(await collect(run))
        assert (connection.lost > 3) == (share > 0)
        await run.close()

    assert results[0] == results[1] == results[2]
    assert all(result is not None and b'"error"' not in result for result in results[0])


@pytest.mark.slow
async def test_a_run_that_is_read_again_goes_on_where_it_was(connect, tmp_path) -> None:
    undisturbed = make_run(connect("alone", 0.0), tmp_path / "alone")
    undisturbed.begin()
    for operation in make_operations():
        undisturbed.accept(operation)
    expected = await collect(undisturbed)

    connection = connect("trainer", 0.0)
    operations = make_operations()
    begin = 0
    for end in (1, 7, 8, 2 * STEPS):
        run = make_run(connection, tmp_path / "run")
        run.restore(RunJournal(tmp_path / "run").read())
        run.go_on() if begin else run.begin()
        for operation in operations[begin:end]:
            run.accept(operation)
        if end < 2 * STEPS:
            # As a kill would: whatever it was doing, nothing of it is told to anybody.
            await asyncio.sleep(0.05)
            for task in run._tasks:
                task.cancel()
            await asyncio.gather(*run._tasks, return_exceptions=True)
        begin = end

    assert await collect(run) == expected


async def test_what_waits_for_a_lower_number_takes_bounded_memory_and_ends_with_its_run(
    connect, tmp_path
) -> None:
    run = make_run(connect("trainer", 0.0), tmp_path / "run", room=200)

    def accept(number: int, size: int) -> None:
        run.accept(RunOperation("forward", b"{" + b" " * (size - 2) + b"}", number))

    accept(3, 90)
    with pytest.raises(BusyError, match="bytes of operations in flight of one client must be at"):
        accept(2, 90)
    accept(1, 5000)  # what closes a gap needs no room
    accept(2, 5000)
    accept(5, 100)  # the third is on the disk
    with pytest.raises(BusyError):
        accept(6, 1)
    assert await run.wait(5, 0) is None

    await run.close()

    result = await run.wait(5, 0)
    assert result is not None
    assert b"whose session has ended" in result
    assert run._room.in_flight() == 0
