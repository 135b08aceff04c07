"""One completion on vLLM: what is asked of a server, and what its answer means here.

vLLM tells one logprob per token, that of the distribution it was drawn from
(``--logprobs-mode processed_logprobs``). Where nothing is cut at temperature 1 it is the model's
own as well, and a greedy draw's is the model's own by vLLM's order of things. Elsewhere the drawn
text is scored by a second request, on the same server and under the same weights.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
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

logger = logging.getLogger(__name__)

_LOWEST_TEMPERATURE = 0.01
"""Below it vLLM draws with this one."""


@dataclass(frozen=True)
class RequestRules:
    """What requests are checked against, and read with."""

    facts: VllmModelFacts
    max_seq_len: int
    tokenizer: Tokenizer | None
    special: Mapping[str, int]
    """Special tokens by their texts."""

    def check(self, request: SampleRequest) -> None:
        """Refuse what cannot be drawn.

        Raises:
            RequestError: a field breaks its rule, or vLLM cannot do what it asks for.
        """
        limits = RequestLimits(
            vocab_size=self.facts.vocab_size,
            max_seq_len=self.max_seq_len,
            # vLLM makes room by taking it from others.
            fits=lambda tokens: True,
            cache_size="",
            has_tokenizer=self.tokenizer is not None,
        )
        check_request(request, limits)
        if request.routing:
            raise RequestError(
                "include_routing_matrix must be absent with engine 'vllm', got true: its experts "
                "are not recorded; use engine 'embedded' for router replay"
            )
        if 0 < request.temperature < _LOWEST_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 or >= {_LOWEST_TEMPERATURE} with engine 'vllm', got "
                f"{request.temperature}: it would draw with {_LOWEST_TEMPERATURE}"
            )


@dataclass(eq=False)
class CompletionRun:
    """A request, with what has been told of it so far; a draw may be begun again elsewhere."""

    request: SampleRequest
    seed: int
    rules: RequestRules
    _told: list[int] = field(default_factory=lambda: [])
    _has_told_prompt: bool = False

    @property
    def wanted(self) -> int:
        """Tokens to draw."""
        limit = total_limit(self.request, self.rules.max_seq_len)
        return limit - len(self.request.prompt)

    @property
    def is_plain(self) -> bool:
        """Whether the drawn tokens' logprobs are the model's own."""
        request = self.request
        is_uncut = request.top_k == 0 and request.top_p == 1
        return request.temperature == 0 or (request.temperature == 1 and is_uncut)

    async def on(self, client: VllmClient) -> ServerCompletion:
        """Draw it on a server.

        Raises:
            RequestError: vLLM refuses it.
            EngineError: the server failed, or what a listener has heard came out otherwise.
            LostError: the server is gone, or took new weights where only one may score.
        """
        request = self.request
        prompt, cached = None, 0
        streams = request.listener is not None and self.is_plain and self.wanted > 0
        if request.prompt_logprobs and (streams or self.wanted == 0):
            # A stream does not tell them.
            prompt = (await client.draw(self._scoring(request.prompt, 0))).prompt
        if self.wanted == 0:
            return ServerCompletion([], [], prompt, "length", 0)
        if streams:
            piece = await self._streamed(client, prompt)
        else:
            piece = await client.draw(self._body(with_prompt=request.prompt_logprobs))
            prompt, cached = piece.prompt, piece.cached_tokens
        if piece.finish_reason not in ("stop", "length"):
            raise LostError(f"a draw ended with {piece.finish_reason!r}")
        own = None if self.is_plain else await self._score(client, piece)
        tokens = [self._token(one, n, own) for n, one in enumerate(piece.tokens)]
        if not streams and request.listener is not None:
            self._tell_prompt(prompt)
            self._tell(tokens)
        return ServerCompletion(tokens, piece.labels, prompt, piece.finish_reason, cached)

    def result(
        self,
        outcome: ServerCompletion,
        versions: Sequence[tuple[int, str | None, int]],
        *,
        queue_s: float,
        generation_s: float,
        num_concurrent: int,
    ) -> SampledSequence:
        """What was drawn; ``versions`` are ``(weight version, snapshot, tokens)``, in order."""
        request, tokens = self.request, outcome.tokens
        oldest = min(versions, key=lambda version: version[0])
        token_ids = [token.token_id for token in tokens]
        text_of = text_decoder(self.rules.tokenizer, request.shown)
        return SampledSequence(
            token_ids=token_ids,
            logprobs=[token.logprob for token in tokens],
            sampling_logprobs=[token.sampling_logprob for token in tokens],
            prompt_logprobs=self._prompt_logprobs(outcome.prompt),
            top_logprobs=[token.top or [] for token in tokens] if request.top_logprobs else None,
            text=StopText(text_of, tuple(request.stop)).cut(text_of(token_ids)),
            finish_reason="stop" if outcome.finish_reason == "stop" else "length",
            weight_version=oldest[0],
            snapshot_identity=oldest[1],
            versions=[[number, count] for number, _, count in versions if count],
            seed=self.seed,
            queue_s=queue_s,
            generation_s=generation_s,
            cached_prompt_tokens=outcome.cached_tokens,
            num_concurrent=num_concurrent,
        )

    def _body(self, *, with_prompt: bool = False) -> dict[str, Any]:
        request, rules = self.request, self.rules
        ends = () if request.ignore_eos else rules.facts.eos_token_ids
        # Special tokens seldom show in the text, so they are looked for by their ids.
        named = (rules.special[text] for text in request.stop if text in rules.special)
        params: dict[str, Any] = {
            "max_tokens": self.wanted,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": self.seed,
            "stop_token_ids": sorted({*request.stop_token_ids, *ends, *named}),
            # What ends a text is said above, by the model's own configuration.
            "ignore_eos": True,
            # One more than asked for: the drawn token may be none of them.
            "logprobs": request.top_logprobs + 1 if request.top_logprobs else 0,
            "detokenize": bool(request.stop),
        }
        if request.stop:
            params["stop"] = list(request.stop)
        if with_prompt:
            params["prompt_logprobs"] = 0
        return {"token_ids": list(request.prompt), "sampling_params": params}

    @staticmethod
    def _scoring(tokens: Sequence[int], top: int) -> dict[str, Any]:
        params = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": top, "detokenize": False}
        return {"token_ids": list(tokens), "sampling_params": params}

    async def _streamed(
        self, client: VllmClient, prompt: Sequence[dict[int, float] | None] | None
    ) -> GeneratedPart:
        whole = GeneratedPart()
        async with contextlib.aclosing(client.stream(self._body())) as pieces:
            async for piece in pieces:
                start = len(whole.tokens)
                whole.tokens += piece.tokens
                whole.finish_reason = piece.finish_reason or whole.finish_reason
                whole.labels = piece.labels or whole.labels
                self._tell_prompt(prompt)
                self._tell([self._token(token, 0, None) for token in piece.tokens], start)
        return whole

    async def _score(self, client: VllmClient, piece: GeneratedPart) -> list[dict[int, float]]:
        """The model's own logprobs listed at each drawn token."""
        tokens = [*self.request.prompt, *(token.token_id for token in piece.tokens)]
        scored = await client.draw(self._scoring(tokens, self.request.top_logprobs))
        if {label for label, _ in piece.labels} != {label for label, _ in scored.labels}:
            raise LostError("new weights came before a draw of the old ones was scored")
        rows = (scored.prompt or [])[len(self.request.prompt) :]
        return [row or {} for row in rows]

    def _token(
        self, drawn: GeneratedToken, place: int, own: Sequence[Mapping[int, float]] | None
    ) -> SampledToken:
        top = self.request.top_logprobs
        if own is None:
            listed = {one.token_id: one.logprob for one in drawn.top}
            sampling = 0.0 if self.request.temperature == 0 else drawn.logprob
            return SampledToken(
                drawn.token_id, drawn.logprob, sampling, _most_probable(listed, top)
            )
        logprob = own[place][drawn.token_id]
        return SampledToken(drawn.token_id, logprob, drawn.logprob, _most_probable(own[place], top))

    def _prompt_logprobs(
        self, rows: Sequence[dict[int, float] | None] | None
    ) -> list[float | None] | None:
        request = self.request
        if not request.prompt_logprobs or rows is None:
            return None
        own = [
            None if row is None else row[token]
            for row, token in zip(rows, request.prompt, strict=True)
        ]
        last = request.prompt_logprobs_last
        return own if last is None else own[max(0, len(own) - last) :]

    def _tell_prompt(self, rows: Sequence[dict[int, float] | None] | None) -> None:
        listener = self.request.listener
        if listener is not None and not self._has_told_prompt:
            self._has_told_prompt = True
            _heard(lambda: listener.prefilled(self._prompt_logprobs(rows)))

    def _tell(self, tokens: Sequence[SampledToken], start: int = 0) -> None:
        """Tell the listener of tokens from the place ``start`` on that it has not heard of."""
        listener = self.request.listener
        if listener is None:
            return
        for place, token in enumerate(tokens, start):
            if place >= len(self._told):
                self._told.append(token.token_id)
                _heard(lambda token=token: listener.drew(token))
            elif self._told[place] != token.token_id:
                raise EngineError(
                    "a stream must go on as it began, got another token from the replica that "
                    "took it over: ask again"
                )


@dataclass(frozen=True)
class ServerCompletion:
    """What a server has drawn."""

    tokens: Sequence[SampledToken]
    labels: Sequence[tuple[str, int]]
    prompt: Sequence[dict[int, float] | None] | None
    finish_reason: str
    cached_tokens: int


def _most_probable(listed: Mapping[int, float], count: int) -> TopLogprobs | None:
    if not count:
        return None
    return sorted(listed.items(), key=lambda item: (-item[1], item[0]))[:count]


def _heard(news: Callable[[], None]) -> None:
    try:
        news()
    except Exception:  # its failure is its own
        logger.exception("a listener failed; its completion goes on")
