"""The official Tinker client trains, samples and saves on a served platform, unmodified."""

from __future__ import annotations

import gc
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import peft
import pytest
import tinker
import torch
import transformers
from tests.clients.versions import REFUSES
from tests.integration.served import Served
from tinker import types

from hearth.conformance import identities, load, numbers, surface
from hearth.conformance.suite import Server, run_checks
from hearth.models.lora import LoraOptions
from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.wire.tinker import AdamParams, DatumRecord
from training.quickstart import MODEL

ALICE, BOB = "tml-alice", "tml-bob"
BASE = str(MODEL)
ADAM = types.AdamParams(learning_rate=3e-3)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module", autouse=True)
def no_open_connections() -> Iterator[None]:
    """The official client leaves connections open; no later test is to hear of it."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tinker")
    keys = folder / "keys"
    keys.write_text(f"{ALICE} alice\n{BOB} bob\nx tests\n")
    keys.chmod(0o600)
    platform = Served(folder / "data", api_keys_file=keys, allow_folders="True")
    yield platform
    platform.stop()


@pytest.fixture
def service(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[tinker.ServiceClient]:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    service = tinker.ServiceClient(base_url=served.url, api_key=ALICE)
    yield service
    service.close("success").result(60)


def begin(service: tinker.ServiceClient, **options: Any) -> tinker.TrainingClient:
    made = service.create_lora_training_client(base_model=BASE, **{"rank": 4, "seed": 1} | options)
    return made.result() if hasattr(made, "result") else made


def make_data(seed: int, count: int = 3, **inputs: Callable[[Any, int], Any]) -> list[types.Datum]:
    rng = np.random.default_rng(seed)
    data: list[types.Datum] = []
    for _ in range(count):
        length = int(rng.integers(4, 20))
        tokens = rng.integers(5, 300, length + 1)
        given = {"target_tokens": types.TensorData.from_numpy(tokens[1:])}
        for name, make in inputs.items():
            values = np.asarray(make(rng, length), dtype=np.float32)
            given[name] = types.TensorData.from_numpy(values)
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens[:-1].tolist()), loss_fn_inputs=given
            )
        )
    return data


def policy_data(seed: int) -> list[types.Datum]:
    return make_data(
        seed,
        logprobs=lambda rng, n: -rng.uniform(1, 6, n),
        advantages=lambda rng, n: rng.normal(size=n),
    )


def read_logprobs(result: types.ForwardBackwardOutput) -> list[bytes]:
    return [
        np.asarray(output["logprobs"].tolist(), "f4").tobytes() for output in result.loss_fn_outputs
    ]


def train(client: tinker.TrainingClient, seed: int, steps: int = 3) -> list[Any]:
    """Logprobs, losses and gradient norms of some steps."""
    found: list[Any] = []
    for step in range(steps):
        passed = client.forward_backward(make_data(1000 * seed + step), "cross_entropy")
        stepped = client.optim_step(ADAM)
        result = passed.result()
        found.append((read_logprobs(result), result.metrics["loss:sum"]))
        found.append((stepped.result().metrics or {})["grad_norm"])
    return found


def as_records(data: list[types.Datum]) -> list[DatumRecord]:
    records: list[DatumRecord] = []
    for datum in data:
        given = {
            name: {"data": value.tolist(), "dtype": value.dtype, "shape": value.shape}
            for name, value in datum.loss_fn_inputs.items()
        }
        length = len(datum.model_input.to_ints())
        given.setdefault("weights", {"data": [1.0] * length, "dtype": "float32"})
        chunks = [{"tokens": datum.model_input.to_ints()}]
        records.append(
            DatumRecord.from_dict({"model_input": {"chunks": chunks}, "loss_fn_inputs": given})
        )
    return records


def test_a_run_has_the_very_bits_of_the_trainer_itself(service, tmp_path: Path) -> None:
    found = train(begin(service, rank=8, seed=5), seed=1)

    engine = TrainerEngine(BASE, snapshots=MemorySnapshotStore(), checkpoint_dir=tmp_path / "own")
    lora = LoraOptions(rank=8, alpha=32, seed=5, train_unembed=True)
    model_id = engine.create_model(lora)
    expected: list[Any] = []
    for step in range(3):
        data = as_records(make_data(1000 + step))
        result = engine.forward_backward(model_id, data)
        metrics = engine.optim_step(model_id, AdamParams(learning_rate=3e-3))
        expected.append(([each.tobytes() for each in result.logprobs], result.metrics["loss:sum"]))
        expected.append(metrics["grad_norm"])
    engine.close()
    assert found == expected


def test_sixteen_runs_that_train_and_sample_at_the_same_time_are_each_as_alone(
    served, service
) -> None:
    prompt = types.ModelInput.from_ints([20, 21, 22, 23])

    def train_and_sample(seed: int) -> Any:
        client = begin(service, seed=seed)
        found = train(client, seed, steps=2)
        sampler = client.save_weights_and_get_sampling_client()
        params = types.SamplingParams(max_tokens=8, seed=seed, stop=[])
        (sequence,) = sampler.sample(prompt, 1, params).result().sequences
        return found, list(sequence.tokens), list(sequence.logprobs or ())

    alone = [train_and_sample(seed) for seed in range(16)]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(train_and_sample, range(16)))

    assert together == alone
    assert len([each for each in served.resources("rlorTrainerJobs") if "tinker" in str(each)]) == 1


@pytest.mark.parametrize(
    ("loss_fn", "config", "per_token"),
    [
        ("importance_sampling", None, lambda lp, q, a: -np.exp(lp - q) * a),
        (
            "ppo",
            {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1},
            lambda lp, q, a: -np.minimum(np.exp(lp - q) * a, np.clip(np.exp(lp - q), 0.7, 1.1) * a),
        ),
        ("cispo", None, lambda lp, q, a: -np.clip(np.exp(lp - q), 0.0, 4.0) * lp * a),
        ("stable_reinforce", None, lambda lp, q, a: -np.clip(np.exp(lp - q), 0.0, 1.0) * lp * a),
        ("dro", {"beta": 0.1}, lambda lp, q, a: -(lp * a - 0.05 * (lp - q) ** 2)),
    ],
)
def test_losses_are_sums_of_their_formulas(service, loss_fn, config, per_token) -> None:
    client = begin(service)
    data = policy_data(3)

    result = client.forward_backward(data, loss_fn, config).result()

    expected = 0.0
    for datum, output in zip(data, result.loss_fn_outputs, strict=True):
        given = {
            name: np.asarray(datum.loss_fn_inputs[name].tolist(), "f8")
            for name in ("logprobs", "advantages")
        }
        lp = np.asarray(output["logprobs"].tolist(), "f8")
        expected += float(per_token(lp, given["logprobs"], given["advantages"]).sum())
    assert result.metrics["loss:sum"] == pytest.approx(expected, rel=1e-5)


def test_gradients_of_several_calls_add_up(service) -> None:
    data = make_data(4, count=6)
    once, twice = begin(service), begin(service)
    once.forward_backward(data, "cross_entropy").result()
    twice.forward_backward(data[:2], "cross_entropy").result()
    twice.forward_backward(data[2:], "cross_entropy").result()

    norms = [client.optim_step(ADAM).result().metrics["grad_norm"] for client in (once, twice)]

    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_several_targets_per_token_and_sparse_ones_are_soft_targets(service) -> None:
    client = begin(service)
    tokens = [7, 8, 9, 10]
    targets, weights = np.array([[8, 3], [9, 4], [10, 5], [11, 6]]), np.full((4, 2), 0.5, "f4")
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(targets),
            "weights": types.TensorData.from_numpy(weights),
        },
    )

    result = client.forward_backward([datum], "cross_entropy").result()

    logprobs = np.asarray(result.loss_fn_outputs[0]["logprobs"].tolist()).reshape(4, 2)
    assert result.metrics["loss:sum"] == pytest.approx(-0.5 * logprobs.sum(), rel=1e-5)


def test_a_loss_of_ones_own_runs_at_the_client(service) -> None:
    client = begin(service)

    def loss(data: Any, logprobs: Any) -> Any:
        total = sum((values**2).sum() for values in logprobs)
        return total, {"mine": total.item()}

    result = client.forward_backward_custom(make_data(5), loss).result()

    assert result.metrics["mine"] == pytest.approx(result.metrics["loss:sum"])
    assert client.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_samples_have_the_logprobs_that_the_trainer_gives_them(service) -> None:
    client = begin(service)
    train(client, seed=6)
    sampler = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([20, 21, 22, 23])

    answer = sampler.sample(
        prompt, num_samples=4, sampling_params=types.SamplingParams(max_tokens=12, seed=9)
    ).result()

    assert len({tuple(sequence.tokens) for sequence in answer.sequences}) > 1
    for sequence in answer.sequences:
        whole = [20, 21, 22, 23, *sequence.tokens]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(whole[:-1]),
            loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array(whole[1:]))},
        )
        scored = client.forward([datum], "cross_entropy").result()
        own = np.asarray(scored.loss_fn_outputs[0]["logprobs"].tolist())[3:]
        assert np.abs(own - np.asarray(sequence.logprobs)).max() < 1e-4


def test_a_saved_sampler_stays_what_it_was(service) -> None:
    client = begin(service)
    train(client, seed=7)
    prompt = types.ModelInput.from_ints([30, 31, 32])
    saved = client.save_weights_for_sampler("first").result().path
    sampler = service.create_sampling_client(model_path=saved)
    before = sampler.compute_logprobs(prompt).result()

    train(client, seed=8)
    newer = client.save_weights_and_get_sampling_client()

    assert sampler.compute_logprobs(prompt).result() == before
    assert newer.compute_logprobs(prompt).result() != before
    base = service.create_sampling_client(base_model=BASE)
    assert base.compute_logprobs(prompt).result() not in (before,)


def test_stops_seeds_and_top_lists_of_samples(service) -> None:
    sampler = service.create_sampling_client(base_model=BASE)
    prompt = types.ModelInput.from_ints([40, 41, 42])

    def sample(**params: Any) -> types.SampleResponse:
        given = types.SamplingParams(**{"max_tokens": 24, "seed": 3} | params)
        return sampler.sample(
            prompt,
            num_samples=1,
            sampling_params=given,
            include_prompt_logprobs=True,
            topk_prompt_logprobs=3,
        ).result()

    free = sample(stop=[]).sequences[0]
    assert len(free.tokens) == 24
    assert free.stop_reason == "length"
    assert sample(stop=[]).sequences[0].tokens == free.tokens
    assert sample(stop=[], seed=4).sequences[0].tokens != free.tokens
    stopped = sample(stop=[free.tokens[5]]).sequences[0]
    first = free.tokens.index(free.tokens[5])
    assert stopped.tokens == free.tokens[: first + 1]
    assert stopped.stop_reason == "stop"
    answer = sample(temperature=0.0, stop=[])
    assert (
        sample(temperature=0.0, stop=[], seed=8).sequences[0].tokens == answer.sequences[0].tokens
    )
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[0] is None
    tops = answer.topk_prompt_logprobs
    assert tops is not None
    assert tops[0] is None
    assert [len(top) for top in tops[1:]] == [3, 3]
    assert all(top[0][1] >= top[1][1] >= top[2][1] for top in tops[1:])


def test_saved_states_begin_new_runs_with_and_without_the_optimizer(service) -> None:
    client = begin(service)
    train(client, seed=9)
    path = client.save_state("checkpoint-1").result().path
    assert re.fullmatch(r"tinker://[0-9a-f]+:train:\d+/weights/checkpoint-1", path)
    expected = train(client, seed=10)

    resumed = service.create_training_client_from_state_with_optimizer(path)
    assert train(resumed, seed=10) == expected
    fresh = service.create_training_client_from_state(path)
    without = train(fresh, seed=10)
    assert without[0] == expected[0]
    assert without != expected
    client.load_state_with_optimizer(path).result()
    assert train(client, seed=10) == expected


def test_saved_weights_are_listed_published_kept_for_a_while_and_deleted(served, service) -> None:
    client = begin(service)
    path = client.save_state("here").result().path
    rest = tinker.RestClient(base_url=served.url, api_key=ALICE)
    other = tinker.RestClient(base_url=served.url, api_key=BOB)
    stranger = tinker.ServiceClient(base_url=served.url, api_key=BOB)

    def paths(of: tinker.RestClient) -> list[str]:
        return [
            each.tinker_path for each in of.list_user_checkpoints(limit=100).result().checkpoints
        ]

    assert path in paths(rest)
    assert path not in paths(other)
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 4
    with pytest.raises(tinker.NotFoundError):
        other.get_weights_info_by_tinker_path(path).result()
    rest.publish_checkpoint_from_tinker_path(path).result()
    copy = stranger.create_training_client_from_state(path)
    assert read_logprobs(copy.forward(make_data(1), "cross_entropy").result()) == read_logprobs(
        client.forward(make_data(1), "cross_entropy").result()
    )
    for change in ("unpublish_checkpoint_from_tinker_path", "delete_checkpoint_from_tinker_path"):
        with pytest.raises(tinker.NotFoundError):
            getattr(other, change)(path).result()
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.NotFoundError):
        other.get_weights_info_by_tinker_path(path).result()
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    (mine,) = [
        each
        for each in rest.list_user_checkpoints(limit=100).result().checkpoints
        if each.tinker_path == path
    ]
    assert mine.expires_at is not None
    with pytest.raises(tinker.NotFoundError):
        other.delete_checkpoint_from_tinker_path(path).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert path not in paths(rest)
    with pytest.raises(tinker.RequestFailedError, match="there are none"):
        service.create_training_client_from_state(path).result()


def test_a_downloaded_adapter_is_one_that_peft_loads(served, service, tmp_path: Path) -> None:
    client = begin(service, train_unembed=False)  # PEFT warns of adapters on a tied head
    train(client, seed=11)
    path = client.save_weights_external("download").result().path
    rest = tinker.RestClient(base_url=served.url, api_key=ALICE)

    urls = rest.get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        (tmp_path / name).write_bytes(httpx.get(url, timeout=60).raise_for_status().content)

    base = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, tmp_path)
    (datum,) = make_data(11, count=1)
    ours = client.forward([datum], "cross_entropy").result()
    with torch.no_grad():
        logits = model(torch.tensor([datum.model_input.to_ints()])).logits[0]
    targets = torch.tensor(datum.loss_fn_inputs["target_tokens"].tolist())
    theirs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    own = torch.tensor(ours.loss_fn_outputs[0]["logprobs"].tolist())
    assert torch.allclose(own, theirs, atol=1e-4)
    for url in urls.values():
        start, token, name = url.rsplit("/", 2)
        assert httpx.get(f"{start}/{token[:-1]}/{name}", timeout=60).status_code == 404
        assert httpx.get(f"{start}/{token}/x{name}", timeout=60).status_code == 404
    with pytest.raises(tinker.NotFoundError):
        tinker.RestClient(base_url=served.url, api_key=BOB).get_external_weights_urls(path).result()


def test_runs_of_another_key_do_not_exist(served, service) -> None:
    client = begin(service)
    info = client.get_info()
    body = {"model_id": info.model_id, "seq_id": 1, "adam_params": {}}

    def ask(path: str, body: dict[str, Any], key: str) -> int:
        headers = {"x-api-key": key}
        url = f"{served.url}/api/v1/{path}"
        return httpx.post(url, json=body, headers=headers, timeout=60).status_code

    assert ask("optim_step", body, BOB) == 404
    assert ask("get_info", {"model_id": info.model_id}, BOB) == 404
    assert ask("retrieve_future", {"request_id": f"create:{info.model_id}"}, BOB) == 404
    assert ask("get_info", {"model_id": info.model_id}, ALICE) == 200
    assert ask("get_info", {"model_id": info.model_id}, "tml-wrong") == 401


def test_sessions_samplers_and_samples_of_another_key_do_not_exist(served, service) -> None:
    service.create_sampling_client(base_model=BASE)  # its deployment runs from now on

    def post(path: str, key: str, **body: Any) -> httpx.Response:
        url, headers = f"{served.url}/api/v1/{path}", {"x-api-key": key}
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        while answer.status_code == 408:
            answer = httpx.post(url, json=body, headers=headers, timeout=60)
        return answer

    session_id = post("create_session", ALICE, tags=[]).json()["session_id"]
    opening = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE}
    assert post("create_sampling_session", BOB, **opening).status_code == 404
    sampler_id = post("create_sampling_session", ALICE, **opening).json()["sampling_session_id"]
    asked = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "sampling_params": {"max_tokens": 1000, "stop": [], "seed": 1},
        "sampling_session_id": sampler_id,
        "seq_id": 1,
    }
    assert post("asample", BOB, **asked).status_code == 404
    request_id = post("asample", ALICE, **asked).json()["request_id"]

    others = post("retrieve_future", BOB, request_id=request_id)
    none = post("retrieve_future", BOB, request_id=f"sample:{sampler_id}:2")
    assert others.status_code == none.status_code == 410  # a result is kept for a while only
    post("cancel_future", BOB, request_id=request_id)
    assert post("retrieve_future", ALICE, request_id=request_id).status_code == 200
    assert post("session_heartbeat", BOB, session_id=session_id).status_code == 404
    assert post(f"sessions/{session_id}/finish", BOB).status_code == 404
    url = f"{served.url}/api/v1/sessions"
    shown = {
        key: httpx.get(url, headers={"x-api-key": key}, timeout=60).text for key in (ALICE, BOB)
    }
    assert [session_id in shown[key] for key in (ALICE, BOB)] == [True, False]


def test_what_is_wrong_fails_its_own_future_and_the_run_goes_on(service) -> None:
    client = begin(service)
    before = read_logprobs(client.forward(make_data(1), "cross_entropy").result())
    good = make_data(1)[0]
    outside = types.Datum(
        model_input=types.ModelInput.from_ints([1, 10**6]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([1, 2]))},
    )
    image = types.Datum(
        model_input=types.ModelInput(
            chunks=[types.ImageChunk(data=b"x", format="png", expected_tokens=2)]
        ),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([1, 2]))},
    )
    short = types.Datum(
        model_input=good.model_input,
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.array([1]))},
    )
    for data, loss_fn, message in (
        ([outside], "cross_entropy", "must be token ids"),
        ([image], "cross_entropy", "got a 'image' chunk"),
        ([short], "cross_entropy", "must have shape"),
        ([good], "importance_sampling", "logprobs"),
        ([good], "custom", "loss_fn must be one of"),
    ):
        with pytest.raises(tinker.RequestFailedError, match=message):
            client.forward_backward(data, loss_fn).result()
    with pytest.raises(tinker.RequestFailedError, match="learning_rate"):
        client.optim_step(types.AdamParams(learning_rate=-1.0)).result()
    with pytest.raises(tinker.RequestFailedError, match="there are none"):
        client.load_state("tinker://nobody:train:0/weights/x").result()

    assert read_logprobs(client.forward(make_data(1), "cross_entropy").result()) == before


def test_a_sample_that_is_wrong_fails_alone_and_at_once(service) -> None:
    sampler = service.create_sampling_client(base_model=BASE)
    image = types.ImageChunk(data=b"x", format="png", expected_tokens=2)
    good = types.ModelInput.from_ints([20, 21])
    for prompt, count, params, message in (
        (types.ModelInput(chunks=[image]), 1, {}, "made of encoded_text chunks"),
        (types.ModelInput.from_ints([10**6]), 1, {}, "prompt"),
        (types.ModelInput.from_ints([20] * 10**5), 1, {}, "prompt"),
        (good, 2000, {}, "n must be in 1..1024"),
        (good, 1, {"top_k": -5}, "top_k must be"),
        (good, 1, {"top_p": 2.0}, "top_p must be"),
        (good, 1, {"max_tokens": -1}, "max_tokens must be"),
    ):
        given = types.SamplingParams(**{"max_tokens": 2, "stop": []} | params)
        with pytest.raises(tinker.RequestFailedError, match=message) as failed:
            sampler.sample(prompt, count, given).result(60)
        assert failed.value.category is types.RequestErrorCategory.User

    answer = sampler.sample(good, 1, types.SamplingParams(max_tokens=2, stop=[])).result(60)
    assert len(answer.sequences[0].tokens) == 2


def test_an_unknown_model_fails_its_creation(service) -> None:
    with pytest.raises(tinker.RequestFailedError, match="base_model must be an existing folder"):
        service.create_lora_training_client(base_model="/no/such", rank=4).result()


def test_numbers_may_come_out_of_order_and_twice(served, service) -> None:
    client = begin(service)
    model_id = client.get_info().model_id
    headers = {"x-api-key": ALICE}

    def ask(path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{served.url}/api/v1/{path}", json=body, headers=headers, timeout=60)

    def step(number: int, rate: float) -> str:
        answer = ask(
            "optim_step", model_id=model_id, seq_id=number, adam_params={"learning_rate": rate}
        )
        return answer.json()["request_id"]

    third, second = step(3, 0.3), step(2, 0.2)
    first = step(1, 0.1)
    assert step(2, 0.9) == second

    rates = [
        ask("retrieve_future", request_id=id).json()["metrics"]["lr"]
        for id in (first, second, third, second)
    ]
    assert rates == [0.1, 0.2, 0.3, 0.2]
    assert ask("retrieve_future", request_id="op:nobody:train:0:1").status_code == 404
    assert ask("retrieve_future", request_id="sample:gone:sample:0:1").status_code == 410


@pytest.mark.parametrize("victim", ["trainer", "deployment", "platform"])
def test_a_program_outlives_a_sigkill_with_the_numbers_of_an_unbroken_one(
    served, service, victim: str
) -> None:
    expected = train(begin(service, seed=77), seed=20, steps=5)
    client = begin(service, seed=77)
    found = train(client, seed=20, steps=2)
    sampler = client.save_weights_and_get_sampling_client()
    prompt = types.ModelInput.from_ints([50, 51])
    before = sampler.compute_logprobs(prompt).result()
    pending = [client.forward_backward(make_data(20000 + step), "cross_entropy") for step in (2,)]

    if victim == "platform":
        served.kill()
        served.come_back()
    else:
        kind = "rlorTrainerJobs" if victim == "trainer" else "deployments"
        (worker,) = [
            each
            for each in served.resources(kind, "tinker")
            if each["state"] in ("JOB_STATE_RUNNING", "READY")
        ]
        os.kill(worker["pid"], signal.SIGKILL)

    stepped = client.optim_step(ADAM)
    result = pending[0].result()
    found.append((read_logprobs(result), result.metrics["loss:sum"]))
    found.append((stepped.result().metrics or {})["grad_norm"])
    for step in (3, 4):
        result = client.forward_backward(make_data(20000 + step), "cross_entropy").result()
        found.append((read_logprobs(result), result.metrics["loss:sum"]))
        found.append((client.optim_step(ADAM).result().metrics or {})["grad_norm"])
    assert found == expected
    assert sampler.compute_logprobs(prompt).result() == before


def kill_trainer(served: Served) -> None:
    (worker,) = [
        job
        for job in served.resources("rlorTrainerJobs", "tinker")
        if job["state"] == "JOB_STATE_RUNNING"
    ]
    os.kill(worker["pid"], signal.SIGKILL)


def test_a_long_run_goes_on_from_a_checkpoint_of_its_own(served, service) -> None:
    steps = 140  # so many that a checkpoint is behind it
    expected = train(begin(service, seed=78), seed=21, steps=steps + 2)
    client = begin(service, seed=78)

    found = train(client, seed=21, steps=steps)
    kill_trainer(served)
    for step in range(steps, steps + 2):
        result = client.forward_backward(make_data(21000 + step), "cross_entropy").result()
        found.append((read_logprobs(result), result.metrics["loss:sum"]))
        found.append((client.optim_step(ADAM).result().metrics or {})["grad_norm"])
        served.kill()
        served.come_back()

    assert found == expected
    run = client.get_info().model_id.replace(":", "-")
    assert list((served.data_dir / "checkpoints").glob(f"tinker-*/{run}.own-*"))
    assert "operations were sent again" in served.log


def test_what_cannot_be_repeated_ends_the_run_and_is_never_trained_on(served, service) -> None:
    source = begin(service)
    train(source, seed=12)
    path = source.save_state("gone").result().path
    client = service.create_training_client_from_state(path)
    train(client, seed=13)
    rest = tinker.RestClient(base_url=served.url, api_key=ALICE)
    rest.delete_checkpoint_from_tinker_path(path).result()

    kill_trainer(served)

    with pytest.raises(tinker.RequestFailedError, match="load_weights must end as before"):
        client.forward_backward(make_data(1), "cross_entropy").result()


def test_the_conformance_suite_finds_only_what_is_refused_on_purpose(served) -> None:
    server = Server(served.url, ALICE, BASE, other_key=BOB, reference=MODEL, outstanding=60)
    checks = [*surface.list_checks(), *identities.CHECKS, *numbers.CHECKS, *load.CHECKS]

    outcomes = list(run_checks(server, checks))
    server.close()

    assert len(outcomes) > 90
    assert [each for each in outcomes if each.verdict in ("failed", "skipped")] == []
    refused = [each for each in outcomes if each.verdict == "refused"]
    assert {each.name for each in refused} == REFUSES.keys()
    for each in refused:
        assert "must not be asked of this platform: " in each.detail or "JWT" in each.detail
