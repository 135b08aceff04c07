"""A trainer that loses answers, dies and comes back empty, and what a stream makes of it."""

import asyncio
import uuid

import pytest
import tinker
import torch
from tests.unit.sdk.scripted_trainer import Model, Trainer

from hearth.errors import (
    ClosedError,
    EngineError,
    NotFoundError,
    RequestError,
    RequestFailedError,
    TransportError,
)
from hearth.sdk import FiretitanServiceClient, journal
from hearth.sdk.stream import MOST_RESTARTS, OperationStream, Revival
from hearth.sdk.transport import Http, RetryPolicy
from hearth.wire.tinker import ForwardOutput, OptimStepOutput, PathOutput

QUICK = RetryPolicy(attempts=3, base_s=0.001, longest_s=0.002)
ADAM = {"adam_params": {"learning_rate": 0.1}}


class Life:
    """A trainer, its model's stream, and calls on it."""

    def __init__(self, *, can_revive=True):
        self.trainer = Trainer()
        self.revived = 0
        self.trainer.models["first"] = Model()
        self.http = Http(f"{self.trainer.url}/api/v1", "key", retries=QUICK)
        revival = Revival(self.revive, self.model) if can_revive else None
        self.stream = OperationStream(self.http, "first", revival=revival)

    async def revive(self):
        self.revived += 1
        await asyncio.sleep(0.002)
        if not self.trainer.is_alive:
            self.trainer.restart()

    async def model(self):
        model_id = f"model-{uuid.uuid4().hex[:6]}"
        self.trainer.models[model_id] = Model()
        return model_id

    async def post(self, name, **body):
        async with self.stream.turn:
            return await self.stream.submit(name, body)

    async def call(self, name, kind, **body):
        return await self.stream.result(await self.post(name, **body), kind)

    async def train(self, *data):
        """A forward and backward for each of ``data``, then a step."""
        for datum in data:
            await self.add(datum)
        return await self.step()

    async def step(self):
        return await self.call("optim_step", OptimStepOutput, **ADAM)

    async def add(self, data):
        return await self.stream.result(await self.post_data(data), ForwardOutput)

    async def post_data(self, data, name="forward_backward"):
        given = {"data": [data], "loss_fn": "cross_entropy"}
        return await self.post(name, **{f"{name}_input": given})

    async def lose_held(self):
        """The trainer dies over what it held back, and will execute whatever is sent again."""
        await asyncio.sleep(0.005)
        self.trainer.die()
        self.trainer.held = set()

    async def save(self, name):
        return await self.call("save_weights", PathOutput, path=name)

    @property
    def steps(self):
        return self.trainer.steps(self.stream)


@pytest.fixture
def life():
    return Life()


# Lost answers


@pytest.mark.parametrize("status", [503, 500], ids=["passing", "final"])
async def test_an_operation_whose_answer_was_lost_is_executed_once(life, status):
    life.trainer.loses = {"optim_step": [status]}

    await life.train("a")
    await life.train("b")

    assert life.steps == [[["a"]], [["b"]]]
    assert life.stream.restarts == 0


async def test_a_result_whose_answer_was_lost_is_asked_for_again(life):
    life.trainer.loses = {"retrieve_future": [500, 410, 425]}

    await life.train("a")

    assert life.steps == [[["a"]]]
    assert life.stream.restarts == 0
    assert life.revived == 3


async def test_a_result_that_a_living_trainer_has_forgotten_is_an_error_of_its_own_call(life):
    posted = await life.post("optim_step", **ADAM)
    life.trainer.results.clear()

    with pytest.raises(NotFoundError, match="no such request"):
        await life.stream.result(posted, OptimStepOutput)
    await life.train("a")

    assert life.steps == [[], [["a"]]]


async def test_a_trainer_that_never_answers_although_it_is_there_is_given_up(life):
    life.trainer.loses = {"optim_step": [500] * 1000}

    with pytest.raises(TransportError, match="lost on the way"):
        await life.train("a")

    assert life.trainer.models["first"].executed == ["forward_backward", "optim_step"]


# Deaths


async def test_a_dead_trainer_comes_back_at_the_checkpoint_and_is_sent_the_rest_in_order(life):
    await life.train("a")
    await life.save("one")
    await life.train("b", "c")
    life.trainer.die()

    done = await life.train("d")

    assert life.steps == [[["a"]], [["b"], ["c"]], [["d"]]]
    assert done.metrics["step"] == 3
    assert life.trainer.models[life.stream.model_id].executed == [
        "load_weights",
        "forward_backward",
        "forward_backward",
        "optim_step",
        "forward_backward",
        "optim_step",
    ]


async def test_without_a_checkpoint_everything_since_the_first_weights_is_sent_again(life):
    await life.train("a")
    await life.train("b")
    life.trainer.die()

    await life.train("c")

    assert life.steps == [[["a"]], [["b"]], [["c"]]]


async def test_the_gradient_that_stood_before_a_checkpoint_is_in_the_step_after_it(life):
    await life.add("a")
    await life.save("one")
    await life.add("b")
    life.trainer.die()

    await life.step()

    assert life.steps == [[["a"], ["b"]]]


async def test_a_step_that_was_refused_keeps_the_gradient_also_after_a_death(life):
    await life.add("a")
    with pytest.raises(RequestFailedError, match="adam_params must be good"):
        await life.call("optim_step", OptimStepOutput, adam_params="bad")
    await life.save("one")
    life.trainer.die()

    await life.step()

    assert life.steps == [[["a"]]]


async def test_after_a_load_nothing_of_before_is_sent_again(life):
    life.trainer.checkpoints["other"] = ["kept"]
    await life.train("a")
    await life.call("load_weights", PathOutput, path="other", optimizer=True)
    await life.train("b")
    life.trainer.die()

    await life.train("c")

    assert life.steps == ["kept", [["b"]], [["c"]]]
    assert life.trainer.trail.count(("load_weights", 1)) == 1


async def test_a_load_that_failed_changes_nothing_also_after_a_death(life):
    await life.train("a")
    with pytest.raises(RequestFailedError, match="no such checkpoint"):
        await life.call("load_weights", PathOutput, path="missing", optimizer=True)
    life.trainer.die()

    await life.train("b")

    assert life.steps == [[["a"]], [["b"]]]


async def test_operations_in_flight_get_their_results_once(life):
    life.trainer.held = {"forward_backward", "optim_step"}
    first = await life.post_data("a")
    second = await life.post("optim_step", **ADAM)
    waits = asyncio.gather(
        life.stream.result(first, ForwardOutput), life.stream.result(second, OptimStepOutput)
    )

    await life.lose_held()
    _, stepped = await waits

    assert stepped.metrics["step"] == 1
    assert life.steps == [[["a"]]]


async def test_a_forward_in_flight_is_sent_again_and_a_finished_one_is_not(life):
    await life.stream.result(await life.post_data({}, "forward"), ForwardOutput)
    life.trainer.held = {"forward"}
    posted = await life.post_data({}, "forward")
    waiting = asyncio.ensure_future(life.stream.result(posted, ForwardOutput))

    await life.lose_held()

    assert len((await waiting).loss_fn_outputs) == 1
    assert life.trainer.models[life.stream.model_id].executed == ["forward"]


async def test_a_save_in_flight_is_done_again_over_what_it_had_written(life):
    await life.train("a")
    life.trainer.held = {"save_weights"}
    posted = await life.post("save_weights", path="one", overwrite=False)
    waiting = asyncio.ensure_future(life.stream.result(posted, PathOutput))
    await asyncio.sleep(0.005)
    life.trainer.checkpoints["one"] = ["half"]

    life.trainer.die()
    life.trainer.held = set()

    assert (await waiting).path == "one"
    assert life.trainer.checkpoints["one"] == [[["a"]]]


async def test_a_sampler_snapshot_in_flight_is_put_again_under_its_identity(life):
    await life.train("a")
    posted = await life.post("save_weights_for_sampler", path="s-1")
    life.trainer.die()

    saved = await life.stream.result(posted, PathOutput)

    assert saved.path == "s-1"
    assert life.trainer.snapshots == {"s-1": [[["a"]]]}


async def test_a_checkpoint_counts_only_once_all_results_of_before_it_are_known(life):
    early = await life.post_data("a")
    await life.step()
    await life.save("one")
    life.trainer.die()

    assert (await life.stream.result(early, ForwardOutput)).metrics == {"loss:sum": 1.0}
    assert life.steps == [[["a"]]]
    life.trainer.die()
    await life.train("b")
    assert life.steps == [[["a"]], [["b"]]]


async def test_many_who_wait_bring_the_model_back_once(life):
    life.trainer.held = {"forward_backward"}
    requests = [await life.post_data(name) for name in "abcdef"]
    waits = asyncio.gather(*(life.stream.result(request, ForwardOutput) for request in requests))

    await life.lose_held()
    await waits
    await life.step()

    assert (life.stream.restarts, life.revived) == (1, 1)
    assert life.steps == [[[name] for name in "abcdef"]]


async def test_a_trainer_that_dies_while_it_is_brought_back_is_brought_back_again(life):
    await life.train("a")
    await life.save("one")
    await life.train("b")
    life.trainer.die()
    life.trainer.dies_at = {"load_weights": 1, "forward_backward": 1}

    await life.train("c")

    assert life.steps == [[["a"]], [["b"]], [["c"]]]
    assert life.trainer.lives == 4


async def test_a_trainer_whose_checkpoint_does_not_load_is_given_up_with_what_to_do(life):
    await life.train("a")
    await life.save("one")
    life.trainer.die()
    del life.trainer.checkpoints["one"]

    for _ in range(2):
        with pytest.raises(EngineError, match=r"'one' must load .* no such check.* Start the same"):
            await life.train("b")
    assert life.trainer.lives == 2


async def test_a_trainer_lost_again_and_again_over_one_operation_is_given_up(life):
    await life.train("a")
    life.trainer.dies_at = {"optim_step": 1000}

    with pytest.raises(EngineError, match=r"optim_step must end.* SIGKILL.* start the same comm"):
        await life.train("b")
    assert life.trainer.lives == MOST_RESTARTS + 1
    with pytest.raises(EngineError, match="optim_step must end"):
        await life.train("c")
    assert life.trainer.lives == MOST_RESTARTS + 1


async def test_a_trainer_that_does_not_start_again_is_given_up_with_its_reason():
    life = Life()

    async def refuse():
        raise EngineError("job must become ready, got FAILED: no memory")

    life.stream._revival = Revival(refuse, life.model)
    life.trainer.die()

    with pytest.raises(EngineError, match=r"optim_step must end.*no memory"):
        await life.train()


async def test_a_trainer_that_was_ended_on_purpose_stays_so(life):
    async def refuse():
        raise ClosedError("job must be running, got CANCELLED")

    await life.train("a")
    life.stream._revival = Revival(refuse, life.model)
    life.trainer.die()

    for _ in range(2):
        with pytest.raises(ClosedError, match="CANCELLED"):
            await life.train("b")
    assert life.trainer.lives == 1


async def test_without_a_way_to_revive_it_a_lost_trainer_is_the_error_it_is():
    life = Life(can_revive=False)
    await life.train("a")
    posted = await life.post("optim_step", **ADAM)
    life.trainer.die()

    with pytest.raises(ClosedError, match="ended by SIGKILL"):
        await life.stream.result(posted, OptimStepOutput)
    with pytest.raises(ClosedError, match="ended by SIGKILL"):
        await life.train("b")
    assert life.stream.journal.operations == []


# The journal's limit


async def test_what_is_too_much_to_be_sent_again_is_a_clear_error(life):
    life.stream.journal.limit = 2000
    for _ in range(4):
        await life.train("x" * 900)
    life.trainer.die()

    with pytest.raises(EngineError, match=r"too many to be sent again: start the same command"):
        await life.train("y")


async def test_a_checkpoint_makes_a_journal_that_was_too_long_whole_again(life):
    life.stream.journal.limit = 2000
    for _ in range(4):
        await life.train("x" * 900)
    await life.save("one")
    await life.train("y")
    life.trainer.die()

    await life.train("z")

    assert life.steps == [[["x" * 900]]] * 4 + [[["y"]], [["z"]]]


async def test_a_checkpoint_does_not_hide_that_a_gradient_is_missing(life):
    life.stream.journal.limit = 2000
    await life.add("x" * 900)
    await life.add("x" * 900)
    await life.add("x" * 900)
    await life.save("one")
    life.trainer.die()

    with pytest.raises(EngineError, match="too many to be sent again"):
        await life.add("y")


async def test_a_run_without_checkpoints_keeps_a_journal_of_bounded_length(life):
    life.stream.journal.limit = 3000
    for _ in range(50):
        await life.train("x" * 300)

    assert life.stream.journal.size <= 3000
    assert len(life.stream.journal.operations) < 25


def test_the_limit_leaves_room_for_hours_of_training():
    assert journal.JOURNAL_BYTES >= 2**28


# Those who stop waiting


async def test_whoever_stops_waiting_for_a_post_leaves_no_number_in_doubt(life):
    posting = asyncio.ensure_future(life.post_data("a"))
    await asyncio.sleep(0)
    posting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await posting

    await life.train("b")

    assert life.steps == [[["a"], ["b"]]]


async def test_whoever_stops_waiting_during_a_recovery_does_not_end_it(life):
    await life.train("a")
    life.trainer.die()
    first = asyncio.ensure_future(life.add("b"))
    await asyncio.sleep(0.001)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first

    await life.train("c")

    assert life.steps == [[["a"]], [["b"], ["c"]]]
    assert life.stream.restarts == 1


async def test_a_result_that_nobody_waits_for_does_not_hold_checkpoints_back(life):
    life.trainer.held = {"forward_backward"}
    waiting = asyncio.ensure_future(life.add("a"))
    await asyncio.sleep(0.005)
    waiting.cancel()
    life.trainer.release()
    await life.train("b")
    await life.save("one")
    await asyncio.sleep(0.01)
    await life.train("c")

    assert life.stream.journal.checkpoint == "one"
    assert [operation.name for operation in life.stream.journal.operations] == [
        "forward_backward",
        "optim_step",
    ]


async def test_a_closed_stream_brings_nothing_back_and_says_so_to_those_who_wait(life):
    began = asyncio.Event()

    async def never():
        began.set()
        await asyncio.sleep(3600)

    await life.train("a")
    life.stream._revival = Revival(never, life.model)
    life.trainer.die()
    waiting = asyncio.ensure_future(life.train("b"))
    await began.wait()

    await life.stream.close()

    with pytest.raises(ClosedError, match="inside the `with` block"):
        await waiting
    with pytest.raises(ClosedError, match="inside the `with` block"):
        await life.train("c")
    assert life.trainer.lives == 1


async def test_an_unloaded_model_is_not_brought_back(life):
    await life.train("a")
    await life.stream.unload()

    with pytest.raises(ClosedError, match="got it unloaded"):
        await life.train("b")
    assert life.trainer.models == {}


async def test_a_refused_post_gives_its_number_to_the_next_one(life):
    with pytest.raises(RequestError, match="path must be nicer"):
        await life.call("save_weights", PathOutput, path="refused")
    await life.train("a")
    life.trainer.die()
    await life.train("b")

    assert life.steps == [[["a"]], [["b"]]]


# Clients


@pytest.fixture
def served():
    """A scripted trainer with the SDK's own client on it, which cuts batches after two datums."""
    trainer = Trainer()

    async def revive():
        if not trainer.is_alive:
            trainer.restart()

    service = FiretitanServiceClient(trainer.url, "key", max_chunk_datums=2, revive=revive)
    yield trainer, service
    service.close()


def _datum():
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": tinker.TensorData(data=[2, 3], dtype="int64")},
    )


def _sum_of(data, logprobs):
    return torch.cat(logprobs).sum(), {}


def _step(client):
    adam = tinker.AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.99, eps=1e-8)
    return client.optim_step(adam).result(10)


def test_a_custom_loss_survives_a_death_between_its_two_halves(served):
    trainer, service = served
    client = service.create_training_client("m")

    def loss(data, logprobs):
        trainer.die()
        return _sum_of(data, logprobs)

    done = client.forward_backward_custom([_datum()], loss).result(10)
    _step(client)

    assert done.metrics["loss:sum"] == -3.0
    assert client.restarts == 1
    (gradient,) = trainer.steps(client.stream)
    assert len(gradient) == 1
    assert trainer.models[client.model_id].executed == ["forward_backward", "optim_step"]


def test_a_custom_loss_that_raises_during_a_death_leaves_the_next_one_whole(served):
    trainer, service = served
    client = service.create_training_client("m")

    def broken(data, logprobs):
        trainer.die()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        client.forward_backward_custom([_datum()], broken).result(10)
    client.forward_backward_custom([_datum()], _sum_of).result(10)
    _step(client)

    assert len(trainer.steps(client.stream)) == 1


def test_a_frozen_reference_comes_back_beside_its_policy(served):
    trainer, service = served
    policy = service.create_training_client("m", 4)
    reference = service.create_base_reference("m")
    _step(policy)
    trainer.die()

    scoring = [client.forward([_datum()]) for client in (policy, reference)]
    rows = [future.result(10).loss_fn_outputs[0]["logprobs"].data for future in scoring]

    assert rows == [[-1.0, -2.0], [-1.0, -2.0]]
    assert (policy.restarts, reference.restarts) == (1, 1)
    assert len(trainer.steps(policy.stream)) == 1
    assert trainer.steps(reference.stream) == []
    assert sorted(trainer.trail[-6:], key=str)[:2] == [
        ("create_model", False),
        ("create_model", True),
    ]


def test_a_trainer_that_dies_over_its_first_model_is_asked_for_it_again(served):
    trainer, service = served
    trainer.dies_at = {"create_model": 1}

    client = service.create_training_client("m")
    _step(client)

    assert (trainer.lives, client.restarts) == (2, 0)
    assert trainer.steps(client.stream) == [[]]


def test_chunks_of_one_batch_survive_a_death_together(served):
    trainer, service = served
    client = service.create_training_client("m")
    trainer.held = {"forward_backward"}
    future = client.forward_backward([_datum() for _ in range(5)])
    while len(trainer.waiting) < 3:
        assert not future.done()
    trainer.die()
    trainer.held = set()

    assert len(future.result(10).loss_fn_outputs) == 5
    _step(client)
    (gradient,) = trainer.steps(client.stream)
    assert [len(data) for data in gradient] == [2, 2, 1]
    assert client.restarts == 1
