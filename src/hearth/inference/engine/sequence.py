"""One request in the engine, and the rules that a request must keep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from hearth.errors import RequestError
from hearth.inference.backend import SampledSequence, SampledToken, SampleRequest, TopLogprobs
from hearth.inference.engine.adapters import Adapter
from hearth.inference.engine.prompts import EVERY, Extras, Prompt
from hearth.inference.sync_tracker import ServingState
from hearth.inference.texts import TextOf
from hearth.wire.routing import Choice

MOST_TOP_LOGPROBS = 20
_LONGEST_CHARACTER = 4
"""Tokens that may hold parts of one character: UTF-8 needs at most four bytes."""


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a backend that a request must keep."""

    vocab_size: int
    max_seq_len: int
    fits: Callable[[int], bool]
    """Whether one sequence of that many tokens fits into an empty cache."""
    cache_size: str
    has_tokenizer: bool


@dataclass(frozen=True)
class VersionRun:
    """Consecutive tokens of one weight version."""

    weight_version: int
    snapshot_identity: str | None
    tokens: int


@dataclass(eq=False)
class SequenceState:
    """A request with what the engine knows of it."""

    request: SampleRequest
    tokens: tuple[int, ...]
    """The prompt."""
    future: Future[SampledSequence]
    seed: int
    stop_ids: tuple[int, ...]
    limit: int
    """Total number of tokens, prompt included, at which it ends."""
    arrived_s: float
    text_of: TextOf
    """Decodes its tokens."""
    started_s: float = 0.0
    stop_text: StopText | None = None
    prompt: Prompt | None = None
    adapter: Adapter | None = None
    """Set once it is loaded; None for the base weights."""
    cached_prompt_tokens: int = 0
    num_concurrent: int = 0
    top_logprobs: list[TopLogprobs] = field(default_factory=lambda: [])
    """Filled when the request asks for them."""
    routing: list[Choice] = field(default_factory=lambda: [])
    """Filled when the request asks for it."""
    runs: list[VersionRun] = field(default_factory=lambda: [])
    """Of the earlier weight versions, in the order of its tokens."""

    @property
    def needs_slot(self) -> bool:
        """Whether it samples tokens; a request for prompt logprobs alone does not."""
        return self.limit > len(self.tokens)

    @property
    def extras(self) -> Extras:
        """What the request needs of the prompt."""
        last = self.request.prompt_logprobs_last
        scored = EVERY if last is None else last
        scored *= self.request.prompt_logprobs
        return Extras(scored, self.request.routing, self.request.prompt_top_logprobs)

    @property
    def serial(self) -> int:
        """The serial number of its adapter; 0 for the base weights."""
        return 0 if self.adapter is None else self.adapter.serial

    def notify_prefill(self) -> None:
        """Call the listener, if there is one, before the first token."""
        if self.request.listener is not None:
            self.request.listener.notify_prefill(self.prompt_logprobs())

    def notify_token(self, token: SampledToken) -> None:
        """Call the listener, if there is one, with the next token."""
        if self.request.listener is not None:
            self.request.listener.notify_token(token)

    def end_run(self, state: ServingState, num_tokens: int) -> None:
        """Of its ``num_tokens`` tokens assign those without a run to the version in ``state``."""
        tokens = num_tokens - sum(run.tokens for run in self.runs)
        identity = state.current_identity if self.adapter is None else self.adapter.identity
        self.runs.append(VersionRun(state.weight_version, identity, tokens))

    def prompt_logprobs(self) -> list[float | None] | None:
        """Those that the request asks for, the prompt's first None; None without a request."""
        if not self.request.prompt_logprobs or self.prompt is None:
            return None
        known, length = self.prompt.logprobs or [], len(self.prompt.tokens)
        every = [*[None] * (length - len(known)), *known]
        return every[max(0, length - self.extras.scored) :]

    def prompt_top_logprobs(self) -> list[TopLogprobs | None] | None:
        """One list per entry of ``prompt_logprobs``; None without a request for them."""
        count, scores = self.request.prompt_top_logprobs, self.prompt_logprobs()
        if not count or scores is None or self.prompt is None or self.prompt.top is None:
            return None
        top = self.prompt.top
        # Both end with the prompt's last token.
        first = len(top.tokens) - len(scores)
        return [
            None if score is None else top.select(first + place, count)
            for place, score in enumerate(scores)
        ]

    def prompt_routing(self) -> Sequence[Choice] | None:
        """Experts of the prompt's positions except the last; None without a request."""
        if not self.request.routing or self.prompt is None or self.prompt.routing is None:
            return None
        return list(self.prompt.routing[:-1])


@dataclass
class StopText:
    """Searches a growing text for stop strings, which may begin and end inside tokens."""

    decode: TextOf
    stops: tuple[str, ...]
    _tokens: list[int] = field(default_factory=lambda: [])
    _start: int = 0
    _read: int = 0
    _tail: str = ""

    def push(self, token: int) -> bool:
        """Take the next token; whether a stop string is now complete."""
        self._tokens.append(token)
        # A token's text depends on its predecessor, so decoding starts a few tokens back.
        known = self.decode(self._tokens[self._start : self._read])
        text = self.decode(self._tokens[self._start :])
        candidate = self._tail + text[len(known) :]
        is_complete = any(stop in candidate for stop in self.stops)
        pending = len(self._tokens) - self._read
        if not text.endswith("\ufffd") or pending > _LONGEST_CHARACTER:
            longest = max(len(stop) for stop in self.stops)
            self._tail = candidate[max(0, len(candidate) - longest + 1) :]
            self._start, self._read = self._read, len(self._tokens)
        return is_complete

    def cut(self, text: str) -> str:
        """``text`` up to its first stop string."""
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text


def check_request(request: SampleRequest, limits: RequestLimits) -> None:
    """Refuse a request that cannot be run.

    Raises:
        RequestError: a field breaks its rule, or the request can never fit into the cache.
    """
    _check_prompt(request, limits)
    _check_values(request)
    if request.stop and not limits.has_tokenizer:
        raise RequestError(
            f"stop must be empty, got {list(request.stop)!r}: this deployment has no tokenizer; "
            "use stop_token_ids"
        )
    if any(not text for text in request.stop):
        raise RequestError(f"stop must be texts of at least 1 character, got {request.stop!r}")
    total = total_limit(request, limits.max_seq_len)
    if total > len(request.prompt) and not limits.fits(total):
        raise RequestError(
            f"max_tokens must be small enough for the KV cache, got {request.max_tokens} after a "
            f"prompt of {len(request.prompt)} tokens: the cache of {limits.cache_size} never "
            "holds them; ask for fewer, or raise cache_mb"
        )


def total_limit(request: SampleRequest, max_seq_len: int) -> int:
    """Tokens at which a request ends: its own limit, or the end of the context."""
    return min(len(request.prompt) + request.max_tokens, max_seq_len)


def _check_prompt(request: SampleRequest, limits: RequestLimits) -> None:
    length = len(request.prompt)
    if length == 0:
        raise RequestError("prompt must be at least 1 token, got []: there is nothing to continue")
    longest = limits.max_seq_len - (1 if request.max_tokens > 0 else 0)
    if length > longest:
        raise RequestError(
            # litellm and others know an overflow by these words.
            f"prompt must be <= {longest} tokens, got {length}: this model's maximum context "
            f"length is {limits.max_seq_len} tokens, completion included"
        )
    _check_ids("prompt", request.prompt, limits)
    _check_ids("stop_token_ids", request.stop_token_ids, limits)


def _check_ids(name: str, ids: Sequence[int], limits: RequestLimits) -> None:
    extremes = (min(ids), max(ids)) if ids else ()
    wrong = [token for token in extremes if not 0 <= token < limits.vocab_size]
    if wrong:
        raise RequestError(
            f"{name} must be token ids in 0..{limits.vocab_size - 1}, got {wrong[0]} at position "
            f"{list(ids).index(wrong[0])}: it was made with another tokenizer"
        )


def _check_values(request: SampleRequest) -> None:
    rule_of_top = f"in 0..{MOST_TOP_LOGPROBS}"
    rules = (
        ("max_tokens", ">= 0", request.max_tokens >= 0),
        ("temperature", "a number >= 0", request.temperature >= 0),
        ("temperature", "finite", math.isfinite(request.temperature)),
        ("top_p", "in (0, 1]", 0 < request.top_p <= 1),
        ("top_k", ">= 0", request.top_k >= 0),
        ("top_logprobs", rule_of_top, 0 <= request.top_logprobs <= MOST_TOP_LOGPROBS),
        ("prompt_top_logprobs", rule_of_top, 0 <= request.prompt_top_logprobs <= MOST_TOP_LOGPROBS),
    )
    why = {
        "max_tokens": "0 samples nothing and only scores the prompt",
        "temperature": "0 takes the most probable token",
        "top_p": "1 keeps every token",
        "top_k": "0 keeps every token",
        "top_logprobs": "each is sent with every sampled token",
        "prompt_top_logprobs": "each is sent with every token of the prompt",
    }
    for name, rule, holds in rules:
        if not holds:
            raise RequestError(
                f"{name} must be {rule}, got {getattr(request, name)!r}: {why[name]}"
            )
