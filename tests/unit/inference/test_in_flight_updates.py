"""Weights that are swapped amid running completions (``running_requests="keep"``)."""

import asyncio
import itertools
import threading
import time
from dataclasses import replace
from functools import partial

import httpx
import orjson
import pytest
import torch
from tests.unit.inference import conftest
from tests.unit.inference.conftest import AppClient, until
from tests.unit.tiny import shake
from transformers import DynamicCache

from hearth.errors import EngineError
from hearth.inference.backend import TokenListener
from hearth.inference.service import create_app
from hearth.models.loading import base_tensors
from hearth.models.lora import LoraOptions
from hearth.sync.chain import Published
from hearth.sync.store import MemorySnapshotStore, Snapshot

pytestmark = pytest.mark.slow

PROMPT = [1, 2, 3]
HOT_LOAD = "/hot_load/v1/models/hot_load"
SMALL, LARGE = LoraOptions(rank=2), LoraOptions(rank=4, alpha=8.0, train_attn=False)


ask = partial(conftest.ask, max_tokens=40)


def act_at(acts) -> TokenListener:
    """A listener that calls ``acts[n]`` on the engine's thread, right after token number ``n``."""
    numbers = itertools.count(1)
    return TokenListener(
        on_prefill=lambda prompt_logprobs: None,
        on_token=lambda token: acts.get(next(numbers), lambda: None)(),
    )


def wait_on_tokens(event: threading.Event) -> TokenListener:
    """A listener that delays every step of the engine a little, until ``event`` is set."""
    return TokenListener(
        on_prefill=lambda prompt_logprobs: None, on_token=lambda token: event.wait(0.005)
    )


@pytest.fixture
def chained(load):
    """Two models in a row, with the base snapshot of the first and the delta to the second."""

    def make():
        store, published, pairs = MemorySnapshotStore(), Published(), []
        for identity in ("a", "b"):
            model = load()
            tensors = base_tensors(model.module)
            shake(tensors, 1)
            if identity == "b":
                shake({name: tensor for name, tensor in tensors.items() if "layers.1" in name}, 2)
            published.publish(store, identity, "qwen", tensors, {}, as_delta=True)
            pairs.append((model, store.get(identity)))
        assert [snapshot.kind for _, snapshot in pairs] == ["base", "delta"]
        return pairs

    return make


def replayed(models, sampled, prompt=PROMPT, temperature=1.0) -> list[float]:
    """Logprobs of the sampled tokens from plain forwards.

    ``models[version]`` reads the tokens whose logits that version gave, on top of the keys and
    values that the models before it computed.
    """
    tokens = [*prompt, *sampled.token_ids]
    cache, rows, start, end = DynamicCache(), [], 0, len(prompt) - 1
    for version, count in sampled.versions:
        end += count
        ids = torch.tensor([tokens[start:end]])
        with torch.no_grad():
            output = models[version].module(input_ids=ids, past_key_values=cache, use_cache=True)
        rows.append(torch.log_softmax(output.logits[0].double() / temperature, -1))
        start = end
    after = torch.cat(rows)[len(prompt) - 1 :]
    return after.gather(1, torch.tensor(sampled.token_ids)[:, None])[:, 0].tolist()


def furthest(rows, others) -> float:
    return max(abs(a - b) for a, b in zip(rows, others, strict=True))


def case_of(kind, load, trained, chained):
    """What is served at first (None: the model as it starts), and what comes amid."""
    if kind == "delta":
        return chained()
    starts = {
        "base": (load(), None),
        "adapter": (load(), None),
        "other-adapter": trained("old", 2, SMALL),
        "no-adapter": trained("old", 2, SMALL),
    }
    is_adapter = kind in ("adapter", "other-adapter")
    return starts[kind], trained("new", 1, LARGE if is_adapter else None)


@pytest.mark.parametrize("kind", ["base", "delta", "adapter", "other-adapter", "no-adapter"])
def test_each_token_is_of_the_version_that_gave_its_logits(start, load, trained, chained, kind):
    (old, served), (new, snapshot) = case_of(kind, load, trained, chained)
    engine, calm = start(), start()
    for runner in (engine, calm):
        if served is not None:
            runner.load_snapshot(served).result()
    wanted = ask(temperature=0.7)
    undisturbed = calm.submit(wanted).result()
    before = engine.state()

    swap = act_at({6: lambda: engine.load_snapshot(snapshot, running_requests="keep")})
    sampled = engine.submit(replace(wanted, listener=swap)).result()

    number = before.weight_version
    assert sampled.versions == [[number, 6], [number + 1, 34]]
    assert (sampled.weight_version, sampled.snapshot_identity) == (number, before.current_identity)
    assert engine.state().current_identity == snapshot.identity
    assert sampled.token_ids[:6] == undisturbed.token_ids[:6]
    assert sampled.sampling_logprobs[:6] == undisturbed.sampling_logprobs[:6]
    models = {number: old, number + 1: new}
    assert furthest(sampled.sampling_logprobs, replayed(models, sampled, temperature=0.7)) < 1e-4
    assert furthest(sampled.logprobs, replayed(models, sampled)) < 1e-4
    # After the swap neither the old model nor the new one alone gives these numbers.
    for alone in (old, new):
        other = replayed(dict.fromkeys(models, alone), sampled)
        assert furthest(sampled.logprobs[6:], other[6:]) > 0.01


def test_a_completion_may_span_many_versions(engine, load, trained):
    versions = [(load(), None), *(trained(f"step-{step}", step) for step in (1, 2, 3))]
    loads = [
        lambda given=snapshot: engine.load_snapshot(given, running_requests="keep")
        for _, snapshot in versions[1:]
    ]

    swaps = act_at({3: loads[0], 4: loads[1], 20: loads[2]})
    sampled = engine.submit(ask(listener=swaps)).result()

    assert sampled.versions == [[0, 3], [1, 1], [2, 16], [3, 20]]
    assert (sampled.weight_version, sampled.snapshot_identity) == (0, None)
    models = {number: model for number, (model, _) in enumerate(versions)}
    assert furthest(sampled.sampling_logprobs, replayed(models, sampled)) < 1e-4


def test_a_group_that_shares_a_prefill_goes_on_together_and_a_late_member_starts_anew(
    start, load, trained
):
    engine, (new, snapshot) = start(), trained("new")
    late = []

    def swap():
        late.append(engine.submit(ask(seed=9)))
        engine.load_snapshot(snapshot, running_requests="keep")

    group = [engine.submit(ask(seed=seed)) for seed in range(3)]
    group.append(engine.submit(ask(seed=3, listener=act_at({5: swap}))))
    sampled = [future.result() for future in group]

    assert engine.stats().prefill_tokens == 2 * 32
    assert sampled[-1].versions == [[0, 5], [1, 35]]
    for completion in sampled:
        assert [version for version, _ in completion.versions] == [0, 1]
        assert sum(count for _, count in completion.versions) == len(completion.token_ids) == 40
        assert (
            furthest(completion.sampling_logprobs, replayed({0: load(), 1: new}, completion)) < 1e-4
        )
    # It was there before the swap, was admitted in the same step, and has nothing of the old.
    (joined,) = (future.result() for future in late)
    assert (joined.versions, joined.cached_prompt_tokens) == ([[1, 40]], 0)
    assert furthest(joined.sampling_logprobs, replayed({1: new}, joined)) < 1e-4
    assert engine.submit(ask(seed=4)).result().cached_prompt_tokens == len(PROMPT)


def test_new_requests_sample_after_a_swap_what_they_sample_from_a_drained_engine(start, trained):
    snapshot = trained("new")[1]
    swapped, drained = start(), start()
    drained.submit(ask(max_tokens=400))
    drained.load_snapshot(snapshot).result()

    def join(engine, acts):
        """What is served after the 6th token of a completion, and another that begins then."""
        found = []
        acts[6] = lambda: found.append((engine.state(), engine.submit(ask([4, 5], seed=1))))
        engine.submit(ask(listener=act_at(acts))).result()
        return found[0][0], found[0][1].result()

    swap = {5: lambda: swapped.load_snapshot(snapshot, running_requests="keep")}
    (state, ours), (_, theirs) = join(swapped, swap), join(drained, {})

    assert (state.stage, state.weight_version) == ("done", 1)
    assert ours.versions == theirs.versions == [[1, 40]]
    assert (ours.weight_version, ours.snapshot_identity) == (1, "new")
    assert ours.token_ids == theirs.token_ids
    assert ours.logprobs == theirs.logprobs


def test_without_it_running_requests_end_on_the_old_weights_while_new_ones_wait(start, trained):
    engine, snapshot, late = start(), trained("new")[1], []
    undisturbed = start().submit(ask()).result()

    def load_and_ask():
        engine.load_snapshot(snapshot)
        late.append(engine.submit(ask(seed=1)))

    sampled = engine.submit(ask(listener=act_at({5: load_and_ask}))).result()

    assert sampled.versions == [[0, 40]]
    assert (sampled.token_ids, sampled.logprobs) == (undisturbed.token_ids, undisturbed.logprobs)
    assert late[0].result().versions == [[1, 40]]


@pytest.mark.parametrize(
    ("first", "second", "versions"),
    [("keep", "drain", [[0, 5], [1, 35]]), ("drain", "keep", [[0, 40]])],
)
def test_snapshots_are_taken_in_their_order_each_in_its_way(
    engine, trained, first, second, versions
):
    def load_both():
        engine.load_snapshot(trained("a", 1)[1], running_requests=first)
        engine.load_snapshot(trained("b", 2)[1], running_requests=second)

    sampled = engine.submit(ask(listener=act_at({5: load_both}))).result()

    assert sampled.versions == versions
    assert engine.watch_sync("b").result().weight_version == 2


@pytest.mark.parametrize("lora", [None, LARGE], ids=["base", "adapter"])
def test_a_load_that_fails_leaves_running_rows_alone(start, trained, lora):
    odd = trained("odd", 1, lora, **{"model.extra.weight": torch.zeros(5)})[1]
    engine, calm = start(), start()
    for runner in (engine, calm):
        runner.load_snapshot(trained("good", 2, SMALL)[1]).result()
    undisturbed = calm.submit(ask()).result()

    swap = act_at({5: lambda: engine.load_snapshot(odd, running_requests="keep")})
    sampled = engine.submit(ask(listener=swap)).result()

    state = engine.state()
    assert (state.stage, state.target_identity, state.weight_version) == ("error", "odd", 1)
    assert "1 unknown ['model.extra.weight']" in state.error
    assert sampled.versions == [[1, 40]]
    assert (sampled.token_ids, sampled.logprobs) == (undisturbed.token_ids, undisturbed.logprobs)


def test_weights_that_compute_no_numbers_leave_running_rows_alone(start, trained):
    broken = trained("broken", **{"model.norm.weight": torch.full((128,), 3e38)})[1]
    engine = start()
    undisturbed = start().submit(ask()).result()

    swap = act_at({5: lambda: engine.load_snapshot(broken, running_requests="keep")})
    sampled = engine.submit(ask(listener=swap)).result()

    assert (engine.state().stage, engine.state().weight_version) == ("error", 0)
    assert (sampled.token_ids, sampled.logprobs) == (undisturbed.token_ids, undisturbed.logprobs)


def test_weights_that_fail_some_tokens_fail_what_runs_and_good_ones_mend_it(start, load):
    engine, model = start("llama"), load("llama")
    good = Snapshot.capture("good", "base", "llama", base_tensors(model.module))
    broken = Snapshot.capture("broken", "base", "llama", base_tensors(model.module))
    # Only hidden states of tokens above 2, which are not probed, are long in the first direction.
    broken.tensors["model.embed_tokens.weight"][3:] = 0
    broken.tensors["model.embed_tokens.weight"][3:, 0] = 1e15
    broken.tensors["lm_head.weight"][:, 0] = 5e37

    swap = act_at({5: lambda: engine.load_snapshot(broken, running_requests="keep")})
    failing = engine.submit(ask(listener=swap))

    with pytest.raises(EngineError, match="NaN after 6 tokens: the weights of version 1 are"):
        failing.result()
    engine.load_snapshot(good, running_requests="keep").result()
    sampled = engine.submit(ask()).result()
    assert furthest(sampled.logprobs, replayed({2: model}, sampled)) < 1e-4


def test_a_snapshot_that_is_read_meanwhile_is_served_before_what_runs_ends(
    start, load, trained, chained
):
    engine, ((first, base), (second, delta)) = start(), chained()
    go = threading.Event()
    running = engine.submit(ask(max_tokens=400, listener=wait_on_tokens(go)))
    while engine.stats().steps < 3:
        time.sleep(0.001)

    loads = [
        engine.hot_load(item.identity, lambda given=item: given, running_requests="keep")
        for item in (base, delta)
    ]
    numbers = [load.result(timeout=20).weight_version for load in loads]
    was_done = running.done()
    go.set()
    sampled = running.result()

    assert (numbers, was_done) == ([1, 2], False)
    assert [version for version, _ in sampled.versions] == [0, 1, 2]
    assert sum(count for _, count in sampled.versions) == 400
    models = {0: load(), 1: first, 2: second}
    assert furthest(sampled.sampling_logprobs, replayed(models, sampled)) < 1e-4


class Site(AppClient):
    """A deployment's app with its engine."""

    def __init__(self, engine, state_dir):
        self.engine = engine
        self.snapshots = MemorySnapshotStore()
        super().__init__(
            create_app(engine, model_name="d", snapshots=self.snapshots, state_dir=state_dir)
        )

    async def complete(self, path, **fields) -> httpx.Response:
        body = {"max_tokens": 300, "seed": 1, "ignore_eos": True, "temperature": 0.9} | fields
        return await self.call("POST", path, json=body)


async def test_a_deployment_asked_to_keep_what_runs_answers_with_every_version(
    start, trained, tmp_path
):
    site, go = Site(start(), tmp_path), threading.Event()
    site.snapshots.put(trained("new")[1])
    chat = [{"role": "user", "content": "hi"}]
    # Every step waits for this one.
    site.engine.submit(ask(max_tokens=400, listener=wait_on_tokens(go)))
    answers = [
        asyncio.ensure_future(entry)
        for entry in (
            site.complete("/v1/completions", prompt=PROMPT, raw_output=True, n=2),
            site.complete("/v1/completions", prompt=PROMPT, stream=True),
            site.complete("/v1/chat/completions", messages=chat, raw_output=True),
            site.complete("/v1/chat/completions", messages=chat, raw_output=True, stream=True),
        )
    ]
    await until(lambda: site.engine.stats().running >= 6)

    order = {"identity": "new", "running_requests": "keep"}
    assert (await site.call("POST", HOT_LOAD, json=order)).status_code == 200
    question = {"wait_for": "new", "timeout_s": "20"}
    (replica,) = (await site.call("GET", HOT_LOAD, params=question)).json()["replicas"]
    early = [answer for answer in answers if answer.done()]
    go.set()
    plain, events, chat_plain, chat_events = [await answer for answer in answers]

    assert (replica["weight_version"], replica["loading_state"]["stage"]) == (1, "done")
    assert early == []
    last = [
        orjson.loads(event.text.strip().split("\n\n")[-2].removeprefix("data: "))
        for event in (events, chat_events)
    ]
    for body in (plain.json(), chat_plain.json(), *last):
        assert body["weight_version"] == 0
        assert "snapshot_identity" not in body
    choices = [*plain.json()["choices"], *chat_plain.json()["choices"], *last[1]["choices"]]
    assert len(choices) == 4
    for choice in choices:
        raw = choice["raw_output"]
        assert [version for version, _ in raw["versions"]] == [0, 1]
        assert sum(n for _, n in raw["versions"]) == len(raw["completion_token_ids"]) == 300
    written = orjson.loads((tmp_path / "serving.json").read_bytes())
    assert (written["identity"], written["weight_version"]) == ("new", 1)


async def test_any_other_wish_for_running_requests_is_refused(start):
    order = {"identity": "new", "running_requests": "freeze"}

    answer = await Site(start(), None).call("POST", HOT_LOAD, json=order)

    assert answer.status_code == 400
    assert "running_requests must be valid, got 'freeze'" in answer.text
