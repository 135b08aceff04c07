"""One completion on vLLM: the request that a server gets, and what its answer means.

vLLM returns one logprob per token, that of the distribution that it sampled
(``--logprobs-mode processed_logprobs``). At temperature 1 without top_k and top_p this is the
model's own, and for a greedy choice vLLM computes it before it applies the temperature. Otherwise
the completion is scored by a second request, on the same server and under the same weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hearth.errors import EngineError, RequestError
from hearth.inference.backend import (
    SampledSequence,
    SampledToken,
    SampleRequest,
    Tokenizer,
    TopLogprobs,
)
from hearth.inference.engine.sequence import RequestLimits, StopText, check_request, total_limit
from hearth.inference.texts import text_decoder
from hearth.inference.vllm.client import GeneratedPart, GeneratedToken, LostError, VllmClient
from hearth.inference.vllm.model import VllmModelFacts

_LOWEST_TEMPERATURE = 0.01
"""Below it vLLM samples with this one."""

TokenLogprobs = Mapping[int, float]
"""Logprobs that are listed at one position, by token id."""


@dataclass(frozen=True)
class RequestRules:
    """The limits that requests must keep, and how they are read."""

    facts: VllmModelFacts
    max_seq_len: int
    tokenizer: Tokenizer | None
    special: Mapping[str, int]
    """Special tokens by their texts."""

    def check(self, request: SampleRequest) -> None:
        """Refuse a request that cannot be run.

        Raises:
            RequestError: a field breaks its rule, or asks for something that vLLM cannot do.
        """
        limits = RequestLimits(
            vocab_size=self.facts.vocab_size,
            max_seq_len=self.max_seq_len,
            # vLLM preempts other requests to make room.
            fits=lambda tokens: True,
            cache_size="",
            has_tokenizer=self.tokenizer is not None,
        )
        check_request(request, limits)
        if request.adapter is not None:
            raise RequestError(
                f"adapter must be absent with engine 'vllm', got {request.adapter.identity!r}: "
                "requests name adapters with engine 'embedded'"
            )
        if request.routing:
            raise RequestError(
                "include_routing_matrix must be absent with engine 'vllm', got true: its experts "
                "are not recorded; use engine 'embedded' for router replay"
            )
        if 0 < request.temperature < _LOWEST_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 or >= {_LOWEST_TEMPERATURE} with engine 'vllm', got "
                f"{request.temperature}: it would sample with {_LOWEST_TEMPERATURE}"
            )


@dataclass(frozen=True)
class ServerCompletion:
    """A completion as a server returned it."""

    tokens: Sequence[SampledToken]
    labels: Sequence[tuple[str, int]]
    """Version labels with the number of tokens of each, in order."""
    prompt: Sequence[TokenLogprobs | None] | None
    finish_reason: str
    cached_tokens: int


@dataclass(eq=False)
class CompletionRun:
    """A request, and what its listener knows; a lost run can be repeated on another server."""

    request: SampleRequest
    seed: int
    rules: RequestRules
    _notified: list[int] = field(default_factory=lambda: [])
    """Tokens that the listener has been called with."""
    _has_notified_prompt: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens to sample."""
        limit = total_limit(self.request, self.rules.max_seq_len)
        return limit - len(self.request.prompt)

    @property
    def is_plain(self) -> bool:
        """Whether the logprobs of the sampled distribution are the model's own."""
        request = self.request
        is_uncut = request.top_k == 0 and request.top_p == 1
        return request.temperature == 0 or (request.temperature == 1 and is_uncut)

    async def run_on(self, client: VllmClient) -> ServerCompletion:
        """Run it on a server.

        Raises:
            RequestError: vLLM refuses it.
            EngineError: the server failed, or its tokens differ from those that a listener has.
            LostError: the server is lost, or took new weights between a completion and its scores.
        """
        request = self.request
        prompt, cached = None, 0
        streams = request.listener is not None and self.is_plain and self.num_tokens > 0
        if request.prompt_logprobs and (streams or self.num_tokens == 0):
            # A stream does not contain them.
            body = self._scoring_body(request.prompt, request.prompt_top_logprobs)
            prompt = (await client.generate(body)).prompt
        if self.num_tokens == 0:
            return ServerCompletion([], [], prompt, "length", 0)
        if streams:
            part = await self._stream(client, prompt)
        else:
            part = await client.generate(self._body(with_prompt=request.prompt_logprobs))
            prompt, cached = part.prompt, part.cached_tokens
        if part.finish_reason not in ("stop", "length"):
            raise LostError(f"a completion ended with {part.finish_reason!r}")
        own = None if self.is_plain else await self._score(client, part)
        tokens = [self._token(token, place, own) for place, token in enumerate(part.tokens)]
        if not streams and request.listener is not None:
            self._notify_prompt(prompt)
            self._notify_tokens(tokens)
        return ServerCompletion(tokens, part.labels, prompt, part.finish_reason, cached)

    def result(
        self,
        completion: ServerCompletion,
        versions: Sequence[tuple[int, str | None, int]],
        *,
        queue_s: float,
        generation_s: float,
        num_concurrent: int,
    ) -> SampledSequence:
        """The result; ``versions`` are ``(weight version, snapshot, tokens)``, in order."""
        request, tokens = self.request, completion.tokens
        oldest = min(versions, key=lambda version: version[0])
        token_ids = [token.token_id for token in tokens]
        text_of = text_decoder(self.rules.tokenizer, request.visible_tokens)
        return SampledSequence(
            token_ids=token_ids,
            logprobs=[token.logprob for token in tokens],
            sampling_logprobs=[token.sampling_logprob for token in tokens],
            prompt_logprobs=self._prompt_logprobs(completion.prompt),
            prompt_top_logprobs=self._prompt_top_logprobs(completion.prompt),
            top_logprobs=[token.top or [] for token in tokens] if request.top_logprobs else None,
            text=StopText(text_of, tuple(request.stop)).cut(text_of(token_ids)),
            finish_reason="stop" if completion.finish_reason == "stop" else "length",
            weight_version=oldest[0],
            snapshot_identity=oldest[1],
            versions=[[number, count] for number, _, count in versions if count],
            seed=self.seed,
            queue_s=queue_s,
            generation_s=generation_s,
            cached_prompt_tokens=completion.cached_tokens,
            num_concurrent=num_concurrent,
        )

    def _body(self, *, with_prompt: bool = False) -> dict[str, Any]:
        request, rules = self.request, self.rules
        eos_ids = () if request.ignore_eos else rules.facts.eos_token_ids
        # Special tokens are left out of the text, so these stop strings are compared by their ids.
        special_ids = (rules.special[text] for text in request.stop if text in rules.special)
        params: dict[str, Any] = {
            "max_tokens": self.num_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": self.seed,
            "stop_token_ids": sorted({*request.stop_token_ids, *eos_ids, *special_ids}),
            # The model's own end tokens are in stop_token_ids.
            "ignore_eos": True,
            # One more than requested, since the sampled token may not be among the most probable.
            "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
            "detokenize": bool(request.stop),
        }
        if request.stop:
            params["stop"] = list(request.stop)
        if with_prompt:
            params["prompt_logprobs"] = request.prompt_top_logprobs
        return {"token_ids": list(request.prompt), "sampling_params": params}

    @staticmethod
    def _scoring_body(tokens: Sequence[int], top: int) -> dict[str, Any]:
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top, "detokenize": False}
        return {"token_ids": list(tokens), "sampling_params": params}

    async def _stream(
        self, client: VllmClient, prompt: Sequence[TokenLogprobs | None] | None
    ) -> GeneratedPart:
        whole = GeneratedPart()
        async with contextlib.aclosing(client.stream(self._body())) as parts:
            async for part in parts:
                start = len(whole.tokens)
                whole.tokens += part.tokens
                whole.finish_reason = part.finish_reason or whole.finish_reason
                whole.labels = part.labels or whole.labels
                self._notify_prompt(prompt)
                self._notify_tokens([self._token(token, 0, None) for token in part.tokens], start)
        return whole

    async def _score(self, client: VllmClient, part: GeneratedPart) -> list[TokenLogprobs]:
        """The model's own logprobs that are listed at each sampled token."""
        tokens = [*self.request.prompt, *(token.token_id for token in part.tokens)]
        scored = await client.generate(self._scoring_body(tokens, self.request.top_logprobs))
        if {label for label, _ in part.labels} != {label for label, _ in scored.labels}:
            raise LostError("weights were swapped between a completion and its scores")
        return [listed or {} for listed in (scored.prompt or [])[len(self.request.prompt) :]]

    def _token(
        self, token: GeneratedToken, place: int, own: Sequence[TokenLogprobs] | None
    ) -> SampledToken:
        if own is None:
            listed, logprob = token.top, token.logprob
            sampling_logprob = 0.0 if self.request.temperature == 0 else logprob
        else:
            listed = own[place]
            logprob, sampling_logprob = listed[token.token_id], token.logprob
        top = _most_probable(listed, self.request.top_logprobs)
        return SampledToken(token.token_id, logprob, sampling_logprob, top)

    def _prompt_logprobs(
        self, listed: Sequence[TokenLogprobs | None] | None
    ) -> list[float | None] | None:
        request = self.request
        if not request.prompt_logprobs or listed is None:
            return None
        own = [
            None if logprobs is None else logprobs[token]
            for logprobs, token in zip(listed, request.prompt, strict=True)
        ]
        last = request.prompt_logprobs_last
        return own if last is None else own[max(0, len(own) - last) :]

    def _prompt_top_logprobs(
        self, listed: Sequence[TokenLogprobs | None] | None
    ) -> list[TopLogprobs | None] | None:
        request = self.request
        if not (request.prompt_logprobs and request.prompt_top_logprobs) or listed is None:
            return None
        count = request.prompt_top_logprobs
        tops = [None if own is None else _most_probable(own, count) for own in listed]
        last = request.prompt_logprobs_last
        return tops if last is None else tops[max(0, len(tops) - last) :]

    def _notify_prompt(self, listed: Sequence[TokenLogprobs | None] | None) -> None:
        if self.request.listener is not None and not self._has_notified_prompt:
            self._has_notified_prompt = True
            self.request.listener.notify_prefill(self._prompt_logprobs(listed))

    def _notify_tokens(self, tokens: Sequence[SampledToken], start: int = 0) -> None:
        """Call the listener with the tokens from place ``start`` on that it does not have."""
        if self.request.listener is None:
            return
        for place, token in enumerate(tokens, start):
            if place >= len(self._notified):
                self._notified.append(token.token_id)
                self.request.listener.notify_token(token)
            elif self._notified[place] != token.token_id:
                raise EngineError(
                    "a stream must continue with the same tokens, got another token from the "
                    "replica that took over: send the request again"
                )


def _most_probable(listed: TokenLogprobs, count: int) -> TopLogprobs | None:
    if not count:
        return None
    return sorted(listed.items(), key=lambda item: (-item[1], item[0]))[:count]
