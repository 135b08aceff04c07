"""Requests that name LoRA adapters: many of them in one batch, on one base."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.inference.conftest import AppClient, ask
from tests.unit.inference.decoders import build
from tests.unit.tiny import shake
from tests.waiting import wait_until

from hearth.errors import ClosedError, NotFoundError, RequestError
from hearth.inference.backend import AdapterSource, SampledSequence, SampleRequest
from hearth.inference.engine.engine import InferenceEngine
from hearth.inference.service import create_app
from hearth.models.loading import LoadedModel
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from hearth.sync.store import MemorySnapshotStore, Snapshot

Trained = Callable[..., tuple[LoadedModel, Snapshot]]

pytestmark = pytest.mark.slow

OPTIONS = [
    LoraOptions(rank=1),
    LoraOptions(rank=4, alpha=8.0, train_mlp=False),
    LoraOptions(rank=8, train_unembed=True),
    LoraOptions(rank=32, train_attn=False),
]


def source(snapshot: Snapshot) -> AdapterSource:
    return AdapterSource(snapshot.identity, lambda: snapshot)


@pytest.fixture
def adapters(trained: Trained) -> list[tuple[LoadedModel, Snapshot]]:
    """Adapters of several ranks and parts, each with the model that it was trained in."""
    return [trained(f"a{seed}", seed, lora=options) for seed, options in enumerate(OPTIONS)]


def numbers(sampled: SampledSequence) -> tuple[list[int], list[float], list[float | None]]:
    assert sampled.prompt_logprobs is not None
    return sampled.token_ids, sampled.logprobs, sampled.prompt_logprobs


def run(engine: InferenceEngine, *requests: SampleRequest) -> list[SampledSequence]:
    return [future.result(60) for future in [engine.submit(request) for request in requests]]


def scored(**options: Any) -> SampleRequest:
    return ask(range(2, 40), max_tokens=24, prompt_logprobs=True, **options)


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [None, "plain", "module"])
@pytest.mark.usefixtures("one_thread")
def test_a_sample_has_the_same_bits_alone_and_beside_other_adapters(
    start: Callable[..., InferenceEngine],
    adapters: list[tuple[LoadedModel, Snapshot]],
    decoder: str | None,
) -> None:
    engine = start(max_adapters=8, decoder=decoder)
    named = [None, *(source(snapshot) for _, snapshot in adapters)]
    alone = [numbers(run(engine, scored(adapter=adapter))[0]) for adapter in named]
    # Computed again: nothing is taken from the first pass.
    fresh = start(max_adapters=8, decoder=decoder)

    crowd = [scored(adapter=adapter, seed=seed) for seed in range(7) for adapter in named]
    others = [scored(adapter=adapter) for adapter in named]
    together = run(fresh, *crowd, *others)[len(crowd) :]

    assert [numbers(sampled) for sampled in together] == alone
    assert fresh.stats().most_slots == len(crowd) + len(others)
    assert len({tuple(tokens) for tokens, _, _ in alone}) == len(named)


@pytest.mark.parametrize("decoder", [None, "plain", "module"])
def test_logprobs_are_those_of_the_trained_models(
    start: Callable[..., InferenceEngine],
    adapters: list[tuple[LoadedModel, Snapshot]],
    plain_logprobs: Callable[..., list[float]],
    load: Callable[..., LoadedModel],
    decoder: str | None,
) -> None:
    engine = start(max_adapters=8, decoder=decoder)
    base = run(engine, scored())[0]

    sampled = run(engine, *(scored(adapter=source(snapshot)) for _, snapshot in adapters))

    models = [*(model for model, _ in adapters), load()]
    for model, completion in zip(models, [*sampled, base], strict=True):
        assert completion.prompt_logprobs is not None
        found = [*completion.prompt_logprobs[1:], *completion.logprobs]
        expected = plain_logprobs(model, [*range(2, 40), *completion.token_ids])
        assert found == pytest.approx(expected, abs=2e-5)
    assert [completion.snapshot_identity for completion in sampled] == ["a0", "a1", "a2", "a3"]
    assert base.snapshot_identity is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen2", "llama with one key head, tied", "partial rotation", "gemma", "experts"]
)
def test_other_families_take_adapters_too(
    start: Callable[..., InferenceEngine], kind: str, plain_logprobs: Callable[..., list[float]]
) -> None:
    trained, loaded = build(kind), build(kind)
    options = LoraOptions(rank=4, train_unembed=True)
    attach_lora(trained, options)
    shake(adapter_tensors(trained), 1)
    tensors = adapter_tensors(trained)
    snapshot = Snapshot.capture("a", "lora", kind, tensors, options.as_metadata())
    engine = start(loaded, with_tokenizer=False, max_adapters=2)

    sampled = run(engine, scored(adapter=source(snapshot)))[0]

    assert sampled.prompt_logprobs is not None
    found = [*sampled.prompt_logprobs[1:], *sampled.logprobs]
    expected = plain_logprobs(trained, [*range(2, 40), *sampled.token_ids])
    assert found == pytest.approx(expected, abs=5e-5)


def test_adapters_of_experts_are_computed_in_one_batch(
    start: Callable[..., InferenceEngine], plain_logprobs: Callable[..., list[float]]
) -> None:
    trained: list[LoadedModel] = []
    snapshots: list[Snapshot] = []
    for place, options in enumerate((OPTIONS[0], OPTIONS[3], OPTIONS[1])):
        model = build("experts")
        attach_lora(model, options)
        shake(adapter_tensors(model), place)
        trained.append(model)
        tensors, facts = adapter_tensors(model), options.as_metadata()
        snapshots.append(Snapshot.capture(f"a{place}", "lora", "experts", tensors, facts))
    engine = start(build("experts"), with_tokenizer=False, max_adapters=4)
    named = [None, *(source(snapshot) for snapshot in snapshots)]

    found = run(engine, *(scored(adapter=adapter, seed=n) for n in (1, 2) for adapter in named))

    assert engine.stats().most_slots == len(found)
    for sampled, model in zip(found, [build("experts"), *trained] * 2, strict=True):
        assert sampled.prompt_logprobs is not None
        expected = plain_logprobs(model, [*range(2, 40), *sampled.token_ids])
        own = [*sampled.prompt_logprobs[1:], *sampled.logprobs]
        assert own == pytest.approx(expected, abs=5e-5)


def test_prompts_are_not_shared_between_adapters(
    start: Callable[..., InferenceEngine], adapters: list[tuple[LoadedModel, Snapshot]]
) -> None:
    engine = start(max_adapters=2)
    first, second = (source(snapshot) for _, snapshot in adapters[:2])

    cached = [
        run(engine, scored(adapter=adapter))[0].cached_prompt_tokens
        for adapter in (None, first, second, first, None)
    ]

    assert cached == [0, 0, 0, 38, 38]


class Shelf:
    """Adapters that are read one at a time, when the test lets them."""

    def __init__(self, *snapshots: Snapshot) -> None:
        self._snapshots = {snapshot.identity: snapshot for snapshot in snapshots}
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[str] = []
        self.read: list[str] = []

    def source(self, identity: str) -> AdapterSource:
        def fetch() -> Snapshot:
            self.begun.append(identity)
            assert self.gate.wait(30)
            self.read.append(identity)
            if identity not in self._snapshots:
                raise NotFoundError(f"snapshot must be kept, got {identity!r}")
            return self._snapshots[identity]

        return AdapterSource(identity, fetch)


@pytest.fixture
def shelf(adapters: list[tuple[LoadedModel, Snapshot]]) -> Shelf:
    return Shelf(*(snapshot for _, snapshot in adapters))


def test_the_least_recently_used_adapter_makes_place(
    start: Callable[..., InferenceEngine], shelf: Shelf
) -> None:
    engine = start(max_adapters=2)

    for identity in ("a0", "a1", "a0", "a2", "a0", "a1"):
        run(engine, ask(adapter=shelf.source(identity)))

    assert shelf.read == ["a0", "a1", "a2", "a1"]


def test_an_adapter_in_use_stays_and_others_wait_for_its_place(
    start: Callable[..., InferenceEngine], shelf: Shelf
) -> None:
    engine = start(max_adapters=1)
    first = [
        engine.submit(ask(max_tokens=300, seed=seed, adapter=shelf.source("a0")))
        for seed in range(3)
    ]
    second = engine.submit(ask(adapter=shelf.source("a1")))
    again = engine.submit(ask(adapter=shelf.source("a0")))

    assert second.result(60).snapshot_identity == "a1"

    assert all(future.done() for future in (*first, again))
    assert shelf.read == ["a0", "a1"]


def test_requests_that_end_before_their_adapter_is_loaded_give_it_back(
    start: Callable[..., InferenceEngine], shelf: Shelf
) -> None:
    engine = start(max_adapters=1)
    shelf.gate.clear()
    left = [engine.submit(ask(adapter=shelf.source(name))) for name in ("a0", "a0", "a1")]
    wait_until(lambda: shelf.begun == ["a0"])

    for future in left:
        assert future.cancel()
    shelf.gate.set()

    assert run(engine, ask(adapter=shelf.source("a2")))[0].snapshot_identity == "a2"
    assert "a1" not in shelf.read
    assert engine.stats().running == 0


def test_base_requests_go_on_while_an_adapter_is_loaded(
    start: Callable[..., InferenceEngine], shelf: Shelf
) -> None:
    engine = start(max_adapters=1)
    shelf.gate.clear()
    waiting = engine.submit(ask(adapter=shelf.source("a0")))

    run(engine, ask())

    assert not waiting.done()
    shelf.gate.set()
    assert waiting.result(60).snapshot_identity == "a0"


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_and_is_tried_again(
    start: Callable[..., InferenceEngine], shelf: Shelf, adapters: Any
) -> None:
    engine = start(max_adapters=2)
    lost = [engine.submit(ask(adapter=shelf.source("lost"))) for _ in range(2)]
    good = engine.submit(ask(adapter=shelf.source("a0")))

    assert good.result(60).snapshot_identity == "a0"
    for future in lost:
        with pytest.raises(NotFoundError, match=r"^snapshot must be kept, got 'lost'$"):
            future.result(60)

    shelf._snapshots["lost"] = replace(adapters[1][1], identity="lost")
    assert run(engine, ask(adapter=shelf.source("lost")))[0].snapshot_identity == "lost"


def test_what_waits_for_an_adapter_fails_when_the_engine_closes(
    start: Callable[..., InferenceEngine], shelf: Shelf
) -> None:
    engine = start(max_adapters=1)
    shelf.gate.clear()
    waiting = [engine.submit(ask(adapter=shelf.source(name))) for name in ("a0", "a1")]

    engine.close()
    shelf.gate.set()

    for future in waiting:
        with pytest.raises(ClosedError):
            future.result(60)


def with_tensor(snapshot: Snapshot, change: Callable[[torch.Tensor], torch.Tensor]) -> Snapshot:
    first = next(iter(snapshot.tensors))
    return replace(snapshot, tensors={**snapshot.tensors, first: change(snapshot.tensors[first])})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda it: replace(it, kind="base"),
            "adapter must name the snapshot of a LoRA adapter, got 'a1', a base",
        ),
        (
            lambda it: replace(it, base_model="b"),
            "adapter must be one of 'qwen', .* got 'a1' of 'b'",
        ),
        (
            lambda it: replace(it, metadata=LoraOptions(rank=513).as_metadata()),
            "adapter must have a rank in 1..512, got 513 in 'a1'",
        ),
        (
            lambda it: with_tensor(it, lambda tensor: tensor * torch.nan),
            "adapter must have finite weights, got .* in 'a1'",
        ),
        (
            lambda it: with_tensor(it, lambda tensor: tensor[:, 1:]),
            r"adapter must fit 'qwen': expected .* of shape \(4, 128\), found \(4, 127\) in 'a1'",
        ),
        (
            lambda it: replace(it, tensors=dict(list(it.tensors.items())[1:])),
            r"adapter must fit 'qwen': expected .* of shape \(4, 128\), found None in 'a1'",
        ),
    ],
)
def test_a_bad_adapter_is_refused(
    start: Callable[..., InferenceEngine],
    adapters: list[tuple[LoadedModel, Snapshot]],
    change: Callable[[Snapshot], Snapshot],
    message: str,
) -> None:
    engine = start(max_adapters=1)

    with pytest.raises(RequestError, match=f"^{message}"):
        run(engine, ask(adapter=source(change(adapters[1][1]))))

    assert run(engine, ask(adapter=source(adapters[0][1])))[0].snapshot_identity == "a0"


def test_a_deployment_without_adapters_refuses_them(engine: InferenceEngine, shelf: Shelf) -> None:
    with pytest.raises(RequestError, match=r"^adapter must be absent, got 'a0': .* max_adapters 0"):
        engine.submit(ask(adapter=shelf.source("a0")))
    assert shelf.read == []


def test_a_weight_sync_changes_the_base_below_the_adapters(
    start: Callable[..., InferenceEngine],
    trained: Trained,
    adapters: list[tuple[LoadedModel, Snapshot]],
    plain_logprobs: Callable[..., list[float]],
) -> None:
    engine = start(max_adapters=2)
    adapter = source(adapters[1][1])
    run(engine, scored(adapter=adapter))
    model, snapshot = trained("new", 9)

    assert engine.load_snapshot(snapshot).result(60).stage == "done"
    refused = engine.load_snapshot(adapters[0][1]).result(60)

    assert refused.error is not None
    assert refused.error.startswith("snapshot 'a0' must be a base or a delta, got an adapter")
    attach_lora(model, OPTIONS[1])
    for name, tensor in adapter_tensors(model).items():
        tensor.data.copy_(adapters[1][1].tensors[name])
    sampled = run(engine, scored(adapter=adapter))[0]
    assert (sampled.weight_version, sampled.cached_prompt_tokens) == (1, 0)
    expected = plain_logprobs(model, [*range(2, 40), *sampled.token_ids])
    assert sampled.prompt_logprobs is not None
    assert [*sampled.prompt_logprobs[1:], *sampled.logprobs] == pytest.approx(expected, abs=2e-5)


async def test_requests_name_an_adapter_over_http(
    start: Callable[..., InferenceEngine], adapters: list[tuple[LoadedModel, Snapshot]]
) -> None:
    store = MemorySnapshotStore()
    for _, snapshot in adapters:
        store.put(snapshot)
    engine = start(max_adapters=2)
    client = AppClient(create_app(engine, model_name="d", snapshots=store))
    fields: dict[str, Any] = {"max_tokens": 4, "seed": 1, "ignore_eos": True}
    completion = fields | {"prompt": [1, 2, 3], "logprobs": True, "logprob_format": "arrays"}

    async def complete(adapter: str | None) -> Any:
        path, body = "/v1/completions", completion | {"adapter": adapter}
        return await client.call("POST", path, json=body)

    answers = await asyncio.gather(*map(complete, ["a0", "a1", "a2", "a3", None]))
    chat = await client.call(
        "POST",
        "/v1/chat/completions",
        json=fields | {"messages": [{"role": "user", "content": "hi"}], "adapter": "a3"},
    )
    unknown = await complete("a9")

    bodies = [answer.json() for answer in answers]
    assert [body.get("snapshot_identity") for body in bodies] == ["a0", "a1", "a2", "a3", None]
    found = [body["choices"][0]["raw_output"]["logprobs"] for body in bodies]
    assert len({tuple(logprobs) for logprobs in found}) == 5
    assert chat.json()["snapshot_identity"] == "a3"
    assert unknown.status_code == 404
    assert "got 'a9'" in unknown.json()["error"]["message"]
