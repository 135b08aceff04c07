import itertools
import math
import random
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.unit.inference.conftest import ask
from tests.waiting import wait_until

from hearth.errors import ClosedError, EngineError, RequestError
from hearth.inference.backend import TokenListener
from hearth.inference.engine.runner import ModelRunner
from hearth.inference.engine.scheduler import Scheduler

CPU = Path("/proc/cpuinfo")
EXACT = (
    torch.backends.mkl.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    # On other makers' CPUs MKL takes other kernels for one row than for many.
    and (CPU.exists() and "GenuineIntel" in CPU.read_text(encoding="utf-8"))
)
"""Where the equality of bits was measured; elsewhere the same tests hold logprobs to 1e-5."""


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(1, longest))]


def assert_same(rows, others) -> None:
    if EXACT:
        assert rows == others
    assert_near(rows, others)


def assert_near(rows, others) -> None:
    """A plain forward's kernels are the library's choice, which differs from CPU to CPU."""
    assert max(abs(a - b) for a, b in zip(rows, others, strict=True)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "length", "threads"),
    [(model, length, 1) for model in ("qwen", "llama") for length in (5, 230, 300)]
    + [("qwen", 50, 2)],
)
def test_a_completion_is_the_same_alone_and_among_forty_others(start, model, length, threads):
    torch.set_num_threads(threads)
    rng = random.Random(length)
    wanted = ask(random_prompt(rng, 1) * length, max_tokens=40, prompt_logprobs=True)
    alone = start(model).submit(wanted).result()
    engine = start(model)

    others = [
        ask(random_prompt(rng, 300), max_tokens=rng.randint(1, 80), seed=index, top_k=index % 3)
        for index in range(40)
    ]
    futures = [engine.submit(other) for other in others[:20]]
    wait_until(lambda: engine.stats().steps > 3)
    crowded = engine.submit(wanted)
    futures += [engine.submit(other) for other in others[20:]]

    assert crowded.result().token_ids == alone.token_ids
    assert_same(crowded.result().logprobs, alone.logprobs)
    assert_same(crowded.result().prompt_logprobs[1:], alone.prompt_logprobs[1:])
    for future, other in zip(futures, others, strict=True):
        assert len(future.result().token_ids) == other.max_tokens
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen", "llama"])
def test_logprobs_are_those_of_a_plain_forward(start, load, plain_logprobs, model):
    rng = random.Random(1)
    prompts = [random_prompt(rng, 60) for _ in range(12)]

    engine, plain = start(model), load(model)
    futures = [engine.submit(ask(p, max_tokens=30, prompt_logprobs=True)) for p in prompts]

    for prompt, future in zip(prompts, futures, strict=True):
        sampled = future.result()
        expected = plain_logprobs(plain, prompt + sampled.token_ids)
        assert sampled.prompt_logprobs[0] is None
        assert_near([*sampled.prompt_logprobs[1:], *sampled.logprobs], expected)
        assert sampled.sampling_logprobs == sampled.logprobs


@pytest.mark.parametrize("decoder", [None, "module"])
@pytest.mark.parametrize("last", [None, 3])
def test_top_logprobs_of_a_prompt_are_those_of_a_plain_forward(start, load, decoder, last):
    prompts = [list(range(2, 2 + length)) for length in (1, 2, 40, 70)]
    request = {"prompt_logprobs": True, "prompt_logprobs_last": last, "max_tokens": 0}
    engine = start(decoder=decoder)
    futures = [engine.submit(ask(prompt, **request)) for prompt in prompts]
    assert all(future.result().prompt_top_logprobs is None for future in futures)

    # The prompts are in memory now, without what these requests need.
    futures = [engine.submit(ask(prompt, prompt_top_logprobs=4, **request)) for prompt in prompts]
    fewer = engine.submit(ask(prompts[2], prompt_top_logprobs=2, **request)).result()

    module = load().module
    for prompt, future in zip(prompts, futures, strict=True):
        sampled = future.result()
        with torch.no_grad():
            rows = module(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        expected = [None, *rows[:-1].topk(4).values.tolist()][-(last or len(prompt)) :]
        tokens = [None, *rows[:-1].topk(4).indices.tolist()][-(last or len(prompt)) :]
        assert len(sampled.prompt_top_logprobs) == len(sampled.prompt_logprobs) == len(expected)
        for top, logprobs, ids in zip(sampled.prompt_top_logprobs, expected, tokens, strict=True):
            assert (top is None) == (logprobs is None)
            if top is not None:
                assert [token for token, _ in top] == ids
                assert [logprob for _, logprob in top] == pytest.approx(logprobs, abs=1e-5)
    assert fewer.prompt_top_logprobs == [
        top and top[:2] for top in futures[2].result().prompt_top_logprobs
    ]
    assert fewer.cached_prompt_tokens == 40


@pytest.mark.slow
def test_logprobs_at_long_context_are_within_1e5_of_a_plain_forward(start, load, plain_logprobs):
    prompt = random_prompt(random.Random(4), 1) * 390

    sampled = start().submit(ask(prompt, max_tokens=60)).result()

    expected = plain_logprobs(load(), prompt + sampled.token_ids)[len(prompt) - 1 :]
    assert max(abs(a - b) for a, b in zip(sampled.logprobs, expected, strict=True)) <= 1e-5


@pytest.mark.slow
def test_bfloat16_samples_with_float32_logprobs_near_those_of_a_plain_forward(
    start, load, plain_logprobs
):
    sampled = start(load(dtype=torch.bfloat16)).submit(ask(max_tokens=30)).result()

    expected = plain_logprobs(load(dtype=torch.bfloat16), [1, 2, 3, *sampled.token_ids])[2:]
    assert max(abs(a - b) for a, b in zip(sampled.logprobs, expected, strict=True)) < 0.15
    assert any(logprob != float(torch.tensor(logprob).bfloat16()) for logprob in sampled.logprobs)


def test_temperature_changes_the_sample_and_its_logprob_but_not_the_raw_logprob(
    start, load, plain_logprobs
):
    sampled = start().submit(ask(temperature=0.5, max_tokens=20)).result()

    raw = plain_logprobs(load(), [1, 2, 3, *sampled.token_ids])[2:]
    assert_near(sampled.logprobs, raw)
    gain = sum(sampled.sampling_logprobs) - sum(sampled.logprobs)
    assert gain > 1


@pytest.mark.slow
def test_greedy_takes_the_most_probable_token_each_time(start, load):
    sampled = start().submit(ask(temperature=0.0, max_tokens=20)).result()

    module, tokens = load().module, [1, 2, 3]
    for token in sampled.token_ids:
        with torch.no_grad():
            assert int(module(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()) == token
        tokens.append(token)
    assert sampled.sampling_logprobs == [0.0] * 20


def test_a_seed_fixes_the_sample_and_a_fresh_one_is_told(engine):
    first, second, other = (engine.submit(ask(seed=seed)).result() for seed in (3, 3, 4))
    fresh = engine.submit(ask(seed=None)).result()

    assert first.token_ids == second.token_ids != other.token_ids
    assert engine.submit(ask(seed=fresh.seed)).result().token_ids == fresh.token_ids
    assert fresh.seed != engine.submit(ask(seed=None)).result().seed


def test_a_completion_resumed_in_the_middle_goes_on_as_before(engine):
    whole = engine.submit(ask(max_tokens=20)).result()

    rest = engine.submit(ask([1, 2, 3, *whole.token_ids[:9]], max_tokens=11)).result()

    assert rest.token_ids == whole.token_ids[9:]


def test_completions_of_one_prompt_share_its_prefill_whenever_they_come(start):
    engine, prompt = start(), list(range(40))

    group = [engine.submit(ask(prompt, seed=seed)) for seed in range(8)]
    sampled = [future.result() for future in group]
    late = engine.submit(ask(prompt, seed=99)).result()

    assert engine.stats().prefill_tokens == 64
    assert engine.stats().cached_prompt_tokens == 8 * 40
    assert (
        sorted(completion.cached_prompt_tokens for completion in [*sampled, late]) == [0] + [40] * 8
    )


@pytest.mark.slow
def test_a_shared_prefill_samples_what_an_own_prefill_samples(start):
    engine = start()

    shared = [engine.submit(ask(seed=seed)) for seed in range(6)]

    for seed, future in enumerate(shared):
        assert future.result().token_ids == start().submit(ask(seed=seed)).result().token_ids


@pytest.mark.parametrize(
    ("length", "max_tokens", "sampled"), [(30, 10, 2), (31, 10, 1), (10, 5, 5), (32, 0, 0)]
)
def test_a_completion_ends_at_max_tokens_or_at_the_end_of_the_context(
    start, length, max_tokens, sampled
):
    result = start(max_seq_len=32).submit(ask([5] * length, max_tokens=max_tokens)).result()

    assert (len(result.token_ids), result.finish_reason) == (sampled, "length")


@pytest.mark.slow
def test_eos_ends_a_completion_and_is_its_last_token_unless_ignored(start, load):
    tokens = start().submit(ask(max_tokens=20)).result().token_ids
    eos = tokens[6]
    engine = start(replace(load(), eos_token_ids=(eos, 1000)))

    ended = engine.submit(ask(max_tokens=20, ignore_eos=False)).result()
    ignored = engine.submit(ask(max_tokens=20)).result()

    assert ended.token_ids == tokens[: tokens.index(eos) + 1]
    assert len(ended.logprobs) == len(ended.sampling_logprobs) == len(ended.token_ids)
    assert ended.finish_reason == "stop"
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")


def test_stop_token_ids_end_a_completion_each_for_its_own_request(engine):
    tokens = engine.submit(ask(max_tokens=20)).result().token_ids

    futures = [
        engine.submit(ask(max_tokens=20, stop_token_ids=stops))
        for stops in ([tokens[4]], [tokens[9], tokens[14]], [])
    ]

    firsts = [tokens.index(tokens[4]), min(tokens.index(tokens[9]), tokens.index(tokens[14])), 19]
    for future, first in zip(futures, firsts, strict=True):
        assert future.result().token_ids == tokens[: first + 1]


@pytest.mark.slow
def test_a_stop_string_may_cross_tokens_and_cuts_the_text_but_not_the_tokens(engine, tokenizer):
    tokens = engine.submit(ask(max_tokens=120)).result().token_ids
    singles = [tokenizer.decode([token]) for token in tokens]
    at = next(
        i
        for i in range(20, 119)
        if (singles[i] + singles[i + 1]).isprintable()
        and singles[i].isascii()
        and singles[i + 1].isascii()
    )
    stop = singles[at] + singles[at + 1]
    whole = tokenizer.decode(tokens)

    sampled = engine.submit(ask(max_tokens=120, stop=["never sampled", stop])).result()

    assert sampled.text == whole[: whole.index(stop)]
    assert sampled.token_ids == tokens[: len(sampled.token_ids)]
    assert tokenizer.decode(sampled.token_ids).endswith(stop)
    assert tokenizer.decode(sampled.token_ids[:-1]).find(stop) == -1
    assert sampled.finish_reason == "stop"


def test_a_special_token_given_as_stop_string_stops_by_its_id(start, load):
    loaded = load()
    with torch.no_grad():
        loaded.module.lm_head.weight[257] *= 6
    engine = start(loaded)

    sampled = [engine.submit(ask(seed=seed, max_tokens=100, stop=["<|end|>"])) for seed in range(8)]

    stopped = [
        completion.result() for completion in sampled if completion.result().finish_reason == "stop"
    ]
    assert len(stopped) >= 4
    assert all(sample.token_ids.index(257) == len(sample.token_ids) - 1 for sample in stopped)
    assert all("<|end|>" not in sample.text for sample in stopped)


def test_max_tokens_0_scores_the_prompt_and_takes_no_row(start, load, plain_logprobs):
    engine, prompt = start(), list(range(50, 100))

    scored = engine.submit(ask(prompt, max_tokens=0, prompt_logprobs=True)).result()

    assert scored.token_ids == []
    assert_near(scored.prompt_logprobs[1:], plain_logprobs(load(), prompt))
    assert engine.stats().most_slots == 0


@pytest.mark.parametrize("last", [1, 7, 49, 50, 80])
def test_of_a_prompts_last_tokens_alone_the_scores_are_those_of_all(start, last):
    engine, prompt = start(), list(range(50, 100))

    part = engine.submit(
        ask(prompt, max_tokens=0, prompt_logprobs=True, prompt_logprobs_last=last)
    ).result()
    whole = engine.submit(ask(prompt, max_tokens=0, prompt_logprobs=True)).result()

    expected = whole.prompt_logprobs[-last:]
    assert len(part.prompt_logprobs) == min(last, 50)
    assert (part.prompt_logprobs[0] is None) == (last >= 50)
    known = [logprob for logprob in part.prompt_logprobs if logprob is not None]
    assert_same(known, [logprob for logprob in expected if logprob is not None])


def test_scores_of_more_tokens_than_were_kept_are_computed_once_more_and_fewer_are_not(start):
    engine, prompt = start(), list(range(50, 100))

    def scored(last):
        asked = ask(prompt, prompt_logprobs=True, prompt_logprobs_last=last)
        return engine.submit(asked).result()

    some, more, fewer = scored(5), scored(9), scored(3)

    assert [sample.cached_prompt_tokens for sample in (some, more, fewer)] == [0, 0, 50]
    assert_same(more.prompt_logprobs[-5:], some.prompt_logprobs)
    assert fewer.prompt_logprobs == more.prompt_logprobs[-3:]


def test_a_prompt_prefilled_without_scores_is_scored_when_asked(engine):
    plain = engine.submit(ask()).result()
    scored = engine.submit(ask(prompt_logprobs=True)).result()
    again = engine.submit(ask()).result()

    assert plain.prompt_logprobs is None
    assert again.prompt_logprobs is None
    assert len(scored.prompt_logprobs) == 3
    assert plain.token_ids == scored.token_ids == again.token_ids


@pytest.mark.slow
def test_requests_beyond_the_cache_wait_and_none_fails(start):
    # 1 MiB holds 1024 tokens of this model: 16 rows of up to 64.
    engine = start(cache_mb=1)

    futures = [engine.submit(ask([index], seed=index)) for index in range(50)]

    assert all(len(future.result().token_ids) == 12 for future in futures)
    assert engine.stats().most_slots == 16
    assert futures[20].result().token_ids == start().submit(ask([20], seed=20)).result().token_ids


@pytest.mark.slow
@pytest.mark.parametrize("max_slots", [5, 20])
def test_rows_are_limited_and_the_rest_waits(start, max_slots):
    engine = start(max_slots=max_slots)

    futures = [engine.submit(ask([index])) for index in range(50)]

    assert all(len(future.result().token_ids) == 12 for future in futures)
    assert engine.stats().most_slots == max_slots


@pytest.mark.slow
def test_a_long_request_is_not_overtaken_forever_by_short_ones(start):
    engine = start(cache_mb=2)
    short = [engine.submit(ask([1, index], max_tokens=60)) for index in range(30)]

    long = engine.submit(ask([2], max_tokens=120))
    later = [engine.submit(ask([3, index], max_tokens=60)) for index in range(30)]

    assert len(long.result().token_ids) == 120
    assert all(len(future.result().token_ids) == 60 for future in (*short, *later))


def test_prefill_is_spread_over_steps_by_its_budget(start):
    engine = start(prefill_tokens=64)

    futures = [engine.submit(ask([index] * 20, max_tokens=4)) for index in range(9)]

    assert all(len(future.result().token_ids) == 4 for future in futures)
    assert engine.stats().prefill_tokens == 9 * 32
    assert engine.stats().most_slots < 9


BAD = {
    "empty prompt": ({"prompt": []}, "prompt must be at least 1 token"),
    "long prompt": ({"prompt": [1] * 512}, "prompt must be <= 511 tokens, got 512"),
    "long score": ({"prompt": [1] * 513, "max_tokens": 0}, "prompt must be <= 512 tokens, got 513"),
    "high id": ({"prompt": [1, 264]}, "token ids in 0..263, got 264 at position 1"),
    "negative id": ({"prompt": [-1]}, "token ids in 0..263, got -1 at position 0"),
    "max_tokens": ({"max_tokens": -1}, "max_tokens must be >= 0, got -1"),
    "temperature": ({"temperature": -0.1}, "temperature must be a number >= 0, got -0.1"),
    "temperature nan": ({"temperature": math.nan}, "temperature must be a number >= 0, got nan"),
    "temperature inf": ({"temperature": math.inf}, "temperature must be finite, got inf"),
    "top_p 0": ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    "top_p 1.1": ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
    "top_p nan": ({"top_p": math.nan}, r"top_p must be in \(0, 1\], got nan"),
    "top_k": ({"top_k": -1}, "top_k must be >= 0, got -1"),
    "stop": ({"stop": ["a", ""]}, "stop must be texts of at least 1 character"),
    "stop id": ({"stop_token_ids": [264]}, "stop_token_ids must be token ids in 0..263, got 264"),
    "cache": ({"max_tokens": 100}, "max_tokens must be small enough for the KV cache, got 100"),
}


@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD.keys())
def test_a_request_that_breaks_a_rule_is_refused_with_the_rule(start, options, message):
    engine = start(cache_mb=1)

    with pytest.raises(RequestError, match=message):
        engine.submit(replace(ask(), **options))


def test_stop_strings_without_a_tokenizer_are_refused(start):
    with pytest.raises(RequestError, match="has no tokenizer"):
        start(with_tokenizer=False).submit(ask(stop=["x"]))


@pytest.mark.slow
def test_cancelling_a_future_frees_its_row_and_leaves_the_others_alone(start):
    engine = start()
    long = [engine.submit(ask([index], max_tokens=450)) for index in range(3)]
    other = engine.submit(ask([9], max_tokens=100))
    wait_until(lambda: engine.stats().running == 4)

    assert all(future.cancel() for future in long)

    assert other.result().token_ids == start().submit(ask([9], max_tokens=100)).result().token_ids
    wait_until(lambda: engine.stats().running == 0)
    assert engine.stats().cancelled == 3
    assert engine.stats().steps < 400


@pytest.mark.slow
def test_a_cancelled_request_that_waits_never_runs(start):
    engine = start(max_slots=16)
    running = [engine.submit(ask([index], max_tokens=60)) for index in range(16)]
    waiting = engine.submit(ask([99], max_tokens=60))

    waiting.cancel()

    with pytest.raises(CancelledError):
        waiting.result()
    assert all(len(future.result().token_ids) == 60 for future in running)
    assert engine.stats().generated_tokens == 16 * 60


def test_closing_fails_what_is_left_and_refuses_what_comes(start):
    engine = start(max_slots=16)
    futures = [engine.submit(ask([index], max_tokens=400)) for index in range(30)]

    engine.close()

    for future in futures:
        with pytest.raises(ClosedError):
            future.result(timeout=5)
    with pytest.raises(ClosedError):
        engine.submit(ask())


def test_a_failing_prefill_fails_its_own_requests_only(start, load):
    loaded = load()

    def refuse(_module, inputs):
        if (inputs[0] == 99).any():
            raise RuntimeError("boom")

    engine = start(loaded)
    loaded.module.get_input_embeddings().register_forward_pre_hook(refuse)
    bad = [engine.submit(ask([99] * 40, seed=seed)) for seed in range(2)]
    good = engine.submit(ask())

    assert len(good.result().token_ids) == 12
    for future in bad:
        with pytest.raises(RuntimeError, match="boom"):
            future.result()
    assert (engine.stats().failed, engine.stats().finished) == (2, 1)


@pytest.mark.slow
def test_a_failing_step_fails_what_runs_and_the_engine_lives_on(start, monkeypatch):
    expected = start().submit(ask()).result().token_ids
    engine = start()
    calls = itertools.count(1)
    decode = ModelRunner.decode

    def fail_once(*args):
        if next(calls) == 3:
            raise RuntimeError("boom")
        return decode(*args)

    # No request makes a step fail that began well; a device out of memory would.
    monkeypatch.setattr(ModelRunner, "decode", fail_once)
    failing = [engine.submit(ask(seed=seed)) for seed in range(4)]

    for future in failing:
        with pytest.raises(RuntimeError, match="boom"):
            future.result()
    assert engine.submit(ask()).result().token_ids == expected


def test_an_engine_that_ends_fails_what_it_has_and_says_so(start, monkeypatch):
    engine = start()

    def fail(*_args):
        raise RuntimeError("admit")

    # Admission fails on no request that passed its checks.
    monkeypatch.setattr(Scheduler, "admit", fail)
    future = engine.submit(ask())

    assert str(engine.failed.result()) == "the engine has ended: RuntimeError: admit"
    with pytest.raises(EngineError, match="the engine has ended"):
        future.result()
    with pytest.raises(ClosedError):
        engine.submit(ask())


def test_queue_time_and_concurrency_are_told(start):
    engine = start(max_slots=16)

    sampled = [engine.submit(ask([index])).result for index in range(32)]
    results = [result() for result in sampled]

    assert max(result.num_concurrent for result in results) <= 16
    assert results[-1].queue_s > results[0].queue_s >= 0
    assert all(result.generation_s > 0 for result in results)
    assert engine.stats().generated_tokens == 32 * 12


def test_a_listener_hears_each_token_before_the_completion_ends(start):
    prompts, tokens = [], []
    listener = TokenListener(prompts.append, tokens.append)
    request = ask(prompt_logprobs=True, temperature=0.5, top_logprobs=2, listener=listener)

    sampled = start().submit(request).result()

    assert prompts == [sampled.prompt_logprobs]
    assert [token.token_id for token in tokens] == sampled.token_ids
    assert [token.logprob for token in tokens] == sampled.logprobs
    assert [token.sampling_logprob for token in tokens] == sampled.sampling_logprobs
    assert [token.top for token in tokens] == sampled.top_logprobs


def test_a_listener_that_fails_harms_neither_its_own_completion_nor_others(engine):
    def fail(_):
        raise OSError("deaf")

    calls = (fail, lambda _: None)
    futures = [engine.submit(ask(listener=TokenListener(call, call))) for call in calls]

    failing, plain = (future.result() for future in futures)
    assert failing.token_ids == plain.token_ids == engine.submit(ask()).result().token_ids
