from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from tests.unit.wire.routes import list_routes

from hearth.trainer.engine import TrainerEngine
from hearth.trainer.service import create_app
from hearth.wire.openapi import TRAINER_ROUTES
from hearth.wire.tensors import TensorRecord
from hearth.wire.tinker import DatumRecord

PREFIX = "/api/v1"


class Client:
    """A bare client of the protocol: posts, numbers, polls."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.seq = 0
        self.model_id = ""

    async def post(self, operation: str, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(f"{PREFIX}/{operation}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def result(self, future: dict[str, Any]) -> dict[str, Any]:
        for _ in range(20):
            answer = await self.post("retrieve_future", request_id=future["request_id"])
            if answer.get("type") != "try_again":
                return answer
        raise AssertionError(f"no result of {future} within 10 s")

    async def run(self, operation: str, **body: Any) -> dict[str, Any]:
        return await self.result(await self.post(operation, **body))

    async def create_model(self, **body: Any) -> dict[str, Any]:
        session = await self.post("create_session", tags=[], sdk_version="0.23.0")
        body = {"base_model": "tiny", "model_seq_id": 0, **session, **body}
        made = await self.run("create_model", **body)
        self.model_id = made.get("model_id", "")
        return made

    async def run_next(self, operation: str, **body: Any) -> dict[str, Any]:
        """The result of an operation on the model, under the next number."""
        self.seq += 1
        return await self.run(operation, model_id=self.model_id, seq_id=self.seq, **body)


def data_of(*data: DatumRecord) -> dict[str, Any]:
    return {"data": [datum.as_dict() for datum in data], "loss_fn": "cross_entropy"}


def row(output: dict[str, Any], index: int) -> np.ndarray:
    return TensorRecord.model_validate(output["loss_fn_outputs"][index]["logprobs"]).to_numpy()


@pytest_asyncio.fixture
async def client(engine: TrainerEngine) -> AsyncIterator[Client]:
    transport = httpx.ASGITransport(create_app(engine, poll_s=0.5))
    async with httpx.AsyncClient(transport=transport, base_url="http://trainer") as http:
        yield Client(http)


@pytest_asyncio.fixture
async def policy(client: Client) -> Client:
    """A client whose model is made."""
    await client.create_model()
    return client


async def test_the_bootstrap_answers_what_clients_insist_on(client: Client) -> None:
    assert (await client.http.get(f"{PREFIX}/healthz")).json() == {"status": "ok"}
    assert await client.post("telemetry", events=[]) == {"status": "accepted"}
    assert await client.post("session_heartbeat", session_id="s") == {}
    config = await client.post("client/config")
    assert (config["proto_write_fwdbwd"], config["proto_compress_fwdbwd"]) == (False, False)
    capabilities = (await client.http.get(f"{PREFIX}/get_server_capabilities")).json()
    assert capabilities == {"supported_models": [{"model_name": "tiny", "max_context_length": 256}]}


async def test_a_model_is_made_once_per_number_of_its_session(client: Client) -> None:
    body = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny"}

    first = await client.post("create_model", **body)
    again = await client.post("create_model", **body)

    assert first == again
    made = await client.result(first)
    assert made["base_model"] == "tiny"
    assert made["tensor_encodings"] == ["list", "base64"]
    assert made["supports_reinforce"] is True
    info = await client.post("get_info", model_id=made["model_id"])
    assert (info["is_lora"], info["lora_rank"], info["model_data"]["arch"]) == (False, 0, "qwen3")


async def test_lora_options_reach_the_model(client: Client) -> None:
    made = await client.create_model(lora_config={"rank": 4, "alpha": 8, "train_unembed": True})

    assert made["lora_rank"] == 4
    info = await client.post("get_info", model_id=made["model_id"])
    assert (info["is_lora"], info["lora_rank"]) == (True, 4)


@pytest.mark.parametrize("encoding", ["list", "base64"])
async def test_both_encodings_carry_the_same_bits(
    policy: Client, engine: TrainerEngine, random_data: Any, encoding: str
) -> None:
    data = random_data(count=5)
    expected = engine.forward(policy.model_id, data)

    answer = await policy.run_next(
        "forward", forward_input=data_of(*data), tensor_encoding=encoding
    )

    kind = {"list": list, "base64": str}[encoding]
    assert isinstance(answer["loss_fn_outputs"][0]["logprobs"]["data"], kind)
    assert all(np.array_equal(row(answer, index), expected.logprobs[index]) for index in range(5))
    assert answer["metrics"] == pytest.approx(expected.metrics)


async def test_a_step_over_the_wire_trains(policy: Client, random_data: Any) -> None:
    data = data_of(*random_data(count=5))
    before = await policy.run_next("forward", forward_input=data)
    await policy.run_next("forward_backward", forward_backward_input=data)

    metrics = (
        await policy.run_next(
            "optim_step",
            type="optim_step",
            adam_params={
                "learning_rate": 1e-3,
                "beta1": 0.9,
                "beta2": 0.95,
                "eps": 1e-8,
                "weight_decay": 0.0,
                "grad_clip_norm": 1.0,
            },
            grad_accumulation_normalization="num_sequences",
        )
    )["metrics"]

    assert (metrics["denominator"], metrics["lr"], metrics["step"]) == (5, 1e-3, 1)
    after = await policy.run_next("forward", forward_input=data)
    assert after["metrics"]["loss:sum"] < before["metrics"]["loss:sum"]


async def test_a_bad_request_fails_its_future_and_the_next_goes_on(
    policy: Client, datum: Any
) -> None:
    bad = await policy.run_next("forward", forward_input=data_of(datum([5, 999])))
    malformed = await policy.run_next("forward", forward_input={"data": 7})
    good = await policy.run_next("forward", forward_input=data_of(datum([5, 6])))

    assert bad["category"] == "user"
    assert "datum 0: target_tokens must be token ids in [0, 96), got 999" in bad["error"]
    assert "forward_input.data must be valid" in malformed["error"]
    assert len(good["loss_fn_outputs"]) == 1


async def test_chunks_that_arrive_out_of_order_run_in_order(policy: Client, datum: Any) -> None:
    train = {"forward_backward_input": data_of(datum([5, 6], weights=[1.0]))}
    adam = {"adam_params": {"learning_rate": 1e-3}, "grad_accumulation_normalization": "none"}

    step = await policy.post("optim_step", model_id=policy.model_id, seq_id=3, **adam)
    second = await policy.post("forward_backward", model_id=policy.model_id, seq_id=2, **train)
    first = await policy.post("forward_backward", model_id=policy.model_id, seq_id=1, **train)
    repeated = await policy.post("forward_backward", model_id=policy.model_id, seq_id=2, **train)

    assert repeated == second
    assert len({step["request_id"], second["request_id"], first["request_id"]}) == 3
    assert (await policy.result(step))["metrics"]["num_sequences"] == 2


@pytest.mark.slow
async def test_a_question_is_held_and_then_answered_try_again(policy: Client) -> None:
    held = await policy.post("forward", model_id=policy.model_id, seq_id=2, forward_input=data_of())
    clock = asyncio.get_running_loop().time
    start = clock()

    answer = await policy.post("retrieve_future", request_id=held["request_id"])

    assert answer == {
        "type": "try_again",
        "request_id": held["request_id"],
        "queue_state": "active",
    }
    assert 0.4 < clock() - start < 3


@pytest.mark.slow
async def test_checkpoints_and_snapshots_go_by_their_names(
    client: Client, engine: TrainerEngine, tmp_path: Path
) -> None:
    await client.create_model(lora_config={"rank": 2, "alpha": 4})

    assert await client.run_next("save_weights", path="step-1") == {"path": "step-1"}
    saved = await client.run_next(
        "save_weights_for_sampler", path="step-1-0a1b2c3d", checkpoint_type="delta"
    )
    loaded = await client.run_next("load_weights", path="step-1", optimizer=True)
    refused = await client.run_next("load_weights", path="step-1-0a1b2c3d", optimizer=True)
    names = (await client.http.get(f"{PREFIX}/list_checkpoints")).json()

    assert saved == {"path": "step-1-0a1b2c3d"}
    assert loaded == {"path": "step-1"}
    assert "must name a resumable checkpoint" in refused["error"]
    assert names == {"checkpoints": ["step-1"]}


async def test_a_precision_that_a_snapshot_would_not_have_is_refused(policy: Client) -> None:
    refused = await policy.run_next("save_weights_for_sampler", path="a", export_precision="nvfp4")
    saved = await policy.run_next("save_weights_for_sampler", path="b", export_precision="source")

    assert "export_precision must be 'source', got 'nvfp4'" in refused["error"]
    assert saved == {"path": "b"}


@pytest.mark.slow
async def test_an_adapter_is_loaded_by_its_folder(
    client: Client, qwen_folder: Path, tmp_path: Path
) -> None:
    from hearth.models.loading import load_model
    from hearth.models.lora import LoraOptions, attach_lora, write_adapter

    loaded = load_model(qwen_folder)
    attach_lora(loaded, LoraOptions(rank=2, alpha=4))
    write_adapter(loaded, tmp_path / "adapter")
    path = str(tmp_path / "adapter")
    await client.create_model(lora_config={"rank": 2, "alpha": 4})

    answer = await client.run_next("load_adapter", adapter_path=path)

    assert answer == {"model_id": client.model_id, "adapter_path": path, "type": "load_adapter"}


async def test_a_base_only_model_refuses_training(client: Client, datum: Any) -> None:
    await client.create_model(base_only=True)
    given = data_of(datum([5, 6], loss_mask=[1.0]))

    scored = await client.run_next("forward", forward_input=given)
    refused = await client.run_next("forward_backward", forward_backward_input=given)

    assert row(scored, 0).shape == (1,)
    assert refused["error_class"] == "ForwardOnlyError"


async def test_unloading_frees_the_model_and_what_it_held(policy: Client, datum: Any) -> None:
    model_id = policy.model_id
    held = await policy.post("forward", model_id=model_id, seq_id=9, forward_input=data_of())

    assert await policy.run("unload_model", model_id=model_id) == {"model_id": model_id}

    assert (await policy.result(held))["error_class"] == "ClosedError"
    late = await policy.http.post(
        f"{PREFIX}/forward",
        json={"model_id": model_id, "seq_id": 1, "forward_input": data_of(datum([5, 6]))},
    )
    assert late.status_code == 404
    twice = await policy.run("unload_model", model_id=model_id)
    assert (twice["error_class"], twice["category"]) == ("NotFoundError", "user")
    assert "the trainer may have been restarted" in twice["error"]
    assert (await policy.create_model())["model_id"] != model_id


async def test_another_base_model_is_refused(client: Client) -> None:
    session = await client.post("create_session")

    answer = await client.run("create_model", base_model="huge", **session)

    assert "base_model must be 'tiny', which this trainer serves, got 'huge'" in answer["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("forward", b"{", 400, "body must be JSON"),
        ("forward", b"[]", 400, "body must be a JSON object"),
        ("forward", b'{"model_id": "m"}', 400, "seq_id an integer, got 'm' and None"),
        ("retrieve_future", b'{"request_id": "x"}', 404, "pending or recent request, got 'x'"),
        ("get_info", b'{"model_id": "x"}', 404, "must name a model of this trainer, got 'x'"),
        (
            "optim_step",
            b'{"model_id": "x", "seq_id": 4}',
            404,
            "got 'x': the trainer may have been restarted",
        ),
        ("weights_info", b'{"tinker_path": "x"}', 404, "path must name one of [], got 'x'"),
    ],
)
async def test_what_cannot_be_queued_is_an_http_error(
    client: Client, path: str, body: bytes, status: int, message: str
) -> None:
    answer = await client.http.post(
        f"{PREFIX}/{path}", content=body, headers={"x-request-id": "r-1"}
    )

    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    assert answer.json()["error"]["request_id"] == "r-1"


@pytest.mark.slow
async def test_a_large_body_is_taken(policy: Client, datum: Any) -> None:
    data = [datum([5] * 200, weights=[0.125] * 199)] * 300

    answer = await policy.run_next("forward", forward_input=data_of(*data))

    rows = [row(answer, index) for index in range(300)]
    assert all(np.array_equal(row, rows[0]) for row in rows)


def test_one_app_serves_several_event_loops(engine: TrainerEngine, datum: Any) -> None:
    app = create_app(engine, poll_s=0.5)
    given = data_of(datum([5, 6]))

    async def use(step: Callable[[Client], Any], **state: Any) -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://trainer") as http:
            client = Client(http)
            vars(client).update(state)
            return await step(client)

    def score(seq: int) -> dict[str, Any]:
        forward = use(
            lambda client: client.run_next("forward", forward_input=given),
            model_id=model_id,
            seq=seq,
        )
        return asyncio.run(forward)

    model_id = asyncio.run(use(lambda client: client.create_model()))["model_id"]

    assert score(0) == score(1)


async def test_a_closed_trainer_answers_410(policy: Client, engine: TrainerEngine) -> None:
    await asyncio.to_thread(engine.close)

    answer = await policy.http.post(
        f"{PREFIX}/optim_step", json={"model_id": policy.model_id, "seq_id": 1, "adam_params": {}}
    )

    assert answer.status_code == 410
    assert "after it was closed" in answer.json()["error"]["message"]


async def test_a_checkpoint_carries_its_number_and_the_clients_metadata(
    policy: Client, engine: TrainerEngine
) -> None:
    metadata = {"cursor": 9, "version": 4, "config": {"lr": 1e-5}, "pinned": True}
    await policy.run_next("optim_step", adam_params={})
    before = time.time()

    saved = await policy.run_next("save_weights", path="s", metadata=metadata)
    loaded = await policy.run_next("load_weights", path="s", optimizer=True)

    assert saved == {"path": "s"}
    assert loaded == {"path": "s", "metadata": metadata}
    facts = engine.read_checkpoint_facts("s")
    assert (facts.seq_id, facts.metadata) == (2, metadata)
    assert before <= facts.created_s <= time.time()


async def test_weights_info_says_what_a_checkpoint_is_of(client: Client) -> None:
    shape = {"train_unembed": True, "train_mlp": False, "train_attn": True}
    await client.create_model(lora_config={"rank": 2, "alpha": 4, **shape})
    await client.run_next("save_weights", path="s")

    info = await client.post("weights_info", tinker_path="s")

    assert info == {"base_model": "tiny", "is_lora": True, "lora_rank": 2, **shape}


async def test_rank_0_is_a_model_that_trains_all_parameters(client: Client) -> None:
    config = {"rank": 0, "train_unembed": True, "train_mlp": True, "train_attn": True}
    made = await client.create_model(lora_config=config, type="create_model")

    assert made["lora_rank"] == 0
    info = await client.post("get_info", model_id=made["model_id"], type="get_info")
    assert set(info["model_data"]) == {"arch", "model_name", "tokenizer_id"}
    assert info["is_lora"] is False


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_config": {"rank": 2, "init_method": "nora"}}, "init_method must be 'kaiming'"),
        ({"projection_head_dim": 8}, "projection_head_dim must be absent, got 8"),
    ],
)
async def test_what_a_model_cannot_have_fails_its_future(
    client: Client, body: dict[str, Any], message: str
) -> None:
    answer = await client.create_model(**body)

    assert message in answer["error"]
    assert answer["category"] == "user"


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "gspo", "dro"])
async def test_metric_names_have_one_colon_and_a_known_reduction(
    policy: Client, random_data: Any, loss: str
) -> None:
    given = data_of(*random_data(count=3)) | {"loss_fn": loss}
    records: Any = given["data"]
    for datum in records:
        inputs = datum["loss_fn_inputs"]
        row = inputs.pop("weights")
        inputs |= (
            {"weights": row}
            if loss == "cross_entropy"
            else {"advantages": row, "logprobs": row | {"data": [-1.0] * len(row["data"])}}
        )

    answer = await policy.run_next("forward_backward", forward_backward_input=given)

    reductions = {"mean", "sum", "min", "max", "slack", "hash_unordered", "unique"}
    assert "loss:sum" in answer["metrics"]
    assert all(name.count(":") == 1 for name in answer["metrics"])
    assert {name.split(":")[1] for name in answer["metrics"]} <= reductions


async def test_phases_are_announced_in_the_order_of_the_work(
    engine: TrainerEngine, datum: Any
) -> None:
    heard: list[str] = []
    transport = httpx.ASGITransport(create_app(engine, poll_s=0.5, on_phase=heard.append))
    async with httpx.AsyncClient(transport=transport, base_url="http://trainer") as http:
        client = Client(http)
        await client.create_model()
        given = data_of(datum([5, 6], weights=[1.0]))
        await client.run_next("forward_backward", forward_backward_input=given)
        await client.run_next("save_weights", path="../out")
        await client.run_next("save_weights_for_sampler", path="s")
        await client.run("unload_model", model_id=client.model_id)

    names = "create_model forward_backward save_weights save_weights_for_sampler unload_model"
    assert heard == [phase for name in names.split() for phase in (name, "idle")]


def test_every_route_is_in_the_published_description(engine: TrainerEngine) -> None:
    assert list_routes(create_app(engine), PREFIX) - {"GET /stats"} == set(TRAINER_ROUTES)
