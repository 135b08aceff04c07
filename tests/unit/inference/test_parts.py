import pytest
import torch

from hearth.errors import ConfigError, RequestError
from hearth.inference.backend import SampleRequest
from hearth.inference.engine.cache import CacheShape, SlotCache, key_span
from hearth.inference.engine.engine import EngineOptions
from hearth.inference.engine.prompts import Extras, Prompt, PromptStore
from hearth.inference.engine.sequence import RequestLimits, StopText, check_request
from hearth.inference.sync_tracker import SyncTracker

SHAPE = CacheShape(
    layers=2, heads=1, key_dim=4, value_dim=2, dtype=torch.float32, device=torch.device("cpu")
)


@pytest.mark.parametrize(
    ("tokens", "span"),
    [(1, 64), (64, 64), (65, 128), (256, 256), (257, 512), (512, 512), (513, 1024)],
)
def test_attention_looks_at_spans_that_round_alike(tokens, span):
    assert key_span(tokens) == span


def test_a_cache_fits_what_its_budget_and_rows_hold():
    # 48 bytes per token: 16 rows of 64 take 49152 bytes.
    cache = SlotCache(SHAPE, budget_bytes=3 * 49152, max_slots=40)

    assert SHAPE.bytes_per_token == 48
    assert cache.fits(1, 192)
    assert not cache.fits(1, 193)
    assert cache.fits(40, 64)
    assert not cache.fits(41, 64)
    assert not cache.fits(40, 128)


def test_a_cache_keeps_its_rows_when_it_grows_and_when_it_changes_form():
    cache = SlotCache(SHAPE, budget_bytes=4 * 49152, max_slots=64)
    keys, values = torch.randn(2, 1, 5, 4), torch.randn(2, 1, 5, 2)
    cache.reserve(3, 60, active=0)
    cache.fill([0, 2], keys, values)

    for rows, tokens in ((40, 60), (16, 250), (60, 60)):
        cache.reserve(rows, tokens, active=3)
        assert cache.keys.shape[1] >= rows
        assert cache.keys.shape[3] >= key_span(tokens)
        assert cache.keys.nbytes + cache.values.nbytes <= 4 * 49152
        for row in (0, 2):
            assert torch.equal(cache.keys[:, row, :, :5], keys)
            assert torch.equal(cache.values[:, row, :, :5], values)


def test_a_moved_row_is_the_one_it_came_from():
    cache = SlotCache(SHAPE, budget_bytes=2**20, max_slots=16)
    cache.reserve(16, 60, active=0)
    for row in range(6):
        cache.fill([row], torch.full((2, 1, 3, 4), row + 1.0), torch.full((2, 1, 3, 2), row + 1.0))

    cache.move([5, 4], [1, 2], 3)

    assert cache.keys[0, :6, 0, 0, 0].tolist() == [1, 6, 5, 4, 5, 6]
    assert cache.values[1, :6, 0, 2, 1].tolist() == [1, 6, 5, 4, 5, 6]


def prompt(*tokens, scored=False) -> Prompt:
    """40 bytes of tensors and 40 per token."""
    return Prompt(
        tokens,
        torch.zeros(1, 1, 1, 4),
        torch.zeros(1, 1, 1, 4),
        torch.zeros(2),
        logprobs=[0.0] if scored else None,
    )


def test_the_prompt_store_drops_the_least_recently_used_beyond_its_budget():
    store = PromptStore(3 * 80)
    for token in (1, 2, 3):
        store.put(prompt(token))

    store.get((1,), Extras())
    store.put(prompt(4))

    assert [token for token in (1, 2, 3, 4) if store.get((token,), Extras())] == [1, 3, 4]


def test_the_prompt_store_keeps_nothing_larger_than_itself_and_one_of_each_prompt():
    store = PromptStore(2 * 80)

    store.put(prompt(*range(10)))
    for scored in (False, True, True):
        store.put(prompt(1, scored=scored))
    store.put(prompt(2))

    assert len(store) == 2
    assert store.get((1,), Extras(scored=True)) is not None
    assert store.get((2,), Extras(scored=True)) is None
    assert store.get((2,), Extras()) is not None


def watched(tokenizer, text: str, *stops: str) -> int | None:
    """The number of tokens (bytes) of ``text`` after which a stop string was seen."""
    watch = StopText(tokenizer.decode, stops)
    for count, token in enumerate(tokenizer.encode(text), 1):
        if watch.push(token):
            return count
    return None


@pytest.mark.parametrize(
    ("text", "stops", "seen"),
    [
        ("abcabd", ["abd"], 6),
        ("abcabd", ["x", "ca", "abcabd"], 4),
        ("aaaaab", ["aab"], 6),
        ("no stop", ["stopp"], None),
        ("x\u00e9y", ["\u00e9"], 3),
        ("\u20ac\u20ac.", ["\u20ac."], 7),
        ("a\U0001f600b", ["\U0001f600b"], 6),
    ],
)
def test_a_stop_string_is_seen_with_its_last_byte(tokenizer, text, stops, seen):
    assert watched(tokenizer, text, *stops) == seen


def test_a_stop_string_is_seen_after_bytes_that_are_no_text(tokenizer):
    watch = StopText(tokenizer.decode, ("ab",))
    lone = tokenizer.encode("\u00e9")[0]

    seen = [watch.push(token) for token in [lone] * 9 + tokenizer.encode("ab")]

    assert seen == [False] * 10 + [True]


def test_a_text_is_cut_before_its_first_stop_string(tokenizer):
    watch = StopText(tokenizer.decode, ("lo", "ell"))

    assert watch.cut("hello") == "h"
    assert watch.cut("none") == "none"


def test_budgets_that_are_left_open_are_a_cpus() -> None:
    cpu = torch.device("cpu")

    found = EngineOptions().budgets(cpu)
    given = EngineOptions(cache_mb=7, prompt_cache_mb=3, prefill_tokens=64).budgets(cpu)

    assert (found.cache_mb, found.prompt_cache_mb, found.prefill_tokens) == (1024, 256, 4096)
    assert (given.cache_mb, given.prompt_cache_mb, given.prefill_tokens) == (7, 3, 64)
    assert EngineOptions(cache_mb=7).budgets(cpu).prompt_cache_mb == 256


@pytest.mark.parametrize(
    "options", [{"max_slots": 0}, {"cache_mb": 0}, {"max_seq_len": 0}, {"gather_s": -1.0}]
)
def test_engine_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be >= "):
        EngineOptions(**options)


@pytest.mark.parametrize(("size", "ids"), [(3, [1, 2]), (264, [1, 2]), (264, [0, 263])])
def test_the_ids_of_a_warm_up_are_taken_by_any_vocabulary(size, ids):
    limits = RequestLimits(size, 64, lambda tokens: True, "1 MiB", has_tokenizer=False)

    check_request(SampleRequest(prompt=ids, max_tokens=4, temperature=0.0), limits)
    with pytest.raises(RequestError, match=f"in 0..{size - 1}, got {size} at position 2"):
        check_request(SampleRequest(prompt=[*ids, size]), limits)


def test_a_version_number_is_never_given_twice():
    serving = SyncTracker()
    serving.begin("step-7", 7)
    serving.fail("step-7", OSError("gone"))
    assert (serving.state().weight_version, serving.state().stage) == (0, "error")

    serving.begin("step-8")
    serving.finish("step-8", is_adapter=False)
    serving.begin("step-7")
    serving.finish("step-7", is_adapter=False)

    assert serving.state().weight_version == 9
