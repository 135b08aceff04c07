"""Sampling from a deployment: token ids in, token ids and their logprobs out."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import orjson

from hearth.errors import ConfigError, TransportError
from hearth.sdk.background import APIFuture, start
from hearth.sdk.completions_call import CompletionsCall
from hearth.sdk.concurrency import AdaptiveConcurrencyController, ConcurrencyController
from hearth.sdk.sampling_requests import SamplingRequest, SamplingRetryPolicy, SamplingTarget
from hearth.sdk.transport import Http
from hearth.wire.completions import (
    Choice,
    CompletionCall,
    CompletionRequest,
    CompletionResponse,
    RawOutput,
)

if TYPE_CHECKING:  # two seconds to import, for a type
    from transformers import PreTrainedTokenizerBase

_PATH = "/inference/v1/completions"
_SEED_STRIDE = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SampledCompletion:
    """One completion of one prompt.

    ``inference_logprobs`` are those of the distribution that was sampled from, one per completion
    token; with ``logprobs_echoed`` one per token after the first, prompt included (there the
    prompt's are the model's own). ``raw_logprobs`` are the model's before temperature.
    ``weight_version`` is the oldest that sampled one of its tokens. ``versions`` are run lengths
    ``[weight version, tokens]``, several where a weight sync kept what ran (``running_requests``).
    ``routing_matrices`` are the experts that a mixture-of-experts model took, if
    ``include_routing_matrix`` asked for them: one text per completion token; with ``echo`` or
    ``include_prompt_routing`` one per token after the first. They are those of the position that
    the token was sampled at, the one before its own.
    """

    text: str
    full_tokens: list[int]
    prompt_len: int
    finish_reason: str
    inference_logprobs: list[float] | None = None
    raw_logprobs: list[float] | None = None
    logprobs_echoed: bool = False
    weight_version: int = 0
    snapshot_identity: str | None = None
    versions: list[list[int]] = field(default_factory=list)
    perf_metrics: Mapping[str, str] = field(default_factory=dict)
    routing_matrices: list[str] | None = None
    seed: int | None = None
    """What the request was sent with: with the same prompt, weights and options it samples the same
    completion again."""
    started: float = field(default=0.0, compare=False)
    """Unix time at which the request was sent."""
    sample_s: float = field(default=0.0, compare=False)
    """Seconds until its answer was there."""

    @property
    def completion_len(self) -> int:
        """Number of sampled tokens."""
        return len(self.full_tokens) - self.prompt_len


class DeploymentSampler:
    """Samples completions from one deployment.

    ``n`` completions are ``n`` requests with ``n=1`` each, all in flight at once as far as the
    ``concurrency_controller`` (by default one that adapts) lets them. A call may be awaited on any
    event loop, also on a fresh one each time, or be used as a list without one.
    """

    # The product documents construct it with these names, so they stay parameters.
    def __init__(
        self,
        inference_url: str,
        model: str,
        api_key: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        concurrency_controller: ConcurrencyController | None = None,
        http_timeout_s: float = 600.0,
        retry_policy: SamplingRetryPolicy | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.target = SamplingTarget(
            Http(inference_url, api_key),
            model,
            AdaptiveConcurrencyController()
            if concurrency_controller is None
            else concurrency_controller,
            retry_policy or SamplingRetryPolicy(),
            http_timeout_s,
        )

    @property
    def concurrency(self) -> ConcurrencyController:
        """What admits its requests."""
        return self.target.controller

    def sample_with_tokens(
        self,
        messages: Sequence[Mapping[str, str]],
        n: int = 1,
        max_tokens: int = 1024,
        temperature: float = 1.0,
        max_seq_len: int | None = None,
        **options: Any,
    ) -> CompletionsCall[SampledCompletion]:
        """``n`` completions of a conversation, tokenized here in the thread of the first use.

        Raises:
            ConfigError: on use: the sampler has no tokenizer, or ``n`` is below 1.
        """

        def begin() -> APIFuture[list[SampledCompletion]]:
            prompt = self._tokenize(messages)
            return self.sample_with_prompt_tokens(
                prompt, n, max_tokens, temperature, max_seq_len, **options
            ).start()

        return CompletionsCall(begin)

    # The product documents call it with these names, so they stay parameters.
    def sample_with_prompt_tokens(
        self,
        prompt_token_ids: Sequence[int],
        n: int = 1,
        max_tokens: int = 1024,
        temperature: float = 1.0,
        max_seq_len: int | None = None,
        *,
        seed: int | None = None,
        stop: str | Sequence[str | int] | None = None,
        http_timeout: float | None = None,
        **options: Any,
    ) -> CompletionsCall[SampledCompletion]:
        """``n`` completions of a prompt, in the order of their seeds.

        A prompt of ``max_seq_len`` tokens or more gives ``[]``; a longer result is left out.
        ``seed`` makes each of the ``n`` completions reproducible. ``stop`` holds strings or token
        ids. ``http_timeout`` bounds one completion, in seconds. ``options`` are further fields of
        ``CompletionRequest`` (``top_p``, ``top_k``, ``echo``, ...).

        Raises:
            ConfigError: on use: ``n`` is below 1, or an option is no field of a completion request.
        """

        def begin() -> APIFuture[list[SampledCompletion]]:
            if n < 1:
                raise ConfigError(f"n must be >= 1, got {n}")
            unknown = set(options) - set(CompletionRequest.model_fields)
            if unknown:
                raise ConfigError(f"sampling options must be request fields, got {sorted(unknown)}")
            prompt = list(prompt_token_ids)
            stops = [stop] if isinstance(stop, str) else list(stop or [])
            request = CompletionRequest(
                model=self.model,
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=temperature,
                stop=[text for text in stops if isinstance(text, str)] or None,
                stop_token_ids=[token for token in stops if isinstance(token, int)] or None,
                logprobs=True,
                logprob_format="arrays",
                encoding="base64",
                raw_output=True,
                perf_metrics_in_response=True,
            ).model_copy(update=options)
            limit = float("inf") if max_seq_len is None else max_seq_len
            fields = request.as_dict()
            bodies = [
                fields if seed is None else fields | {"seed": completion_seed(seed, index)}
                for index in range(n if len(prompt) < limit else 0)
            ]
            return start(self._sample(request, bodies, self._target_within(http_timeout), limit))

        return CompletionsCall(begin)

    def score_token_ids(
        self,
        sequences: Sequence[Sequence[int]],
        *,
        last: int | None = None,
        http_timeout: float | None = None,
    ) -> CompletionsCall[list[float]]:
        """The model's own logprobs of whole sequences, before temperature; nothing is sampled.

        Each list is target-aligned: N - 1 for a sequence of N tokens, or with ``last`` those of so
        many tokens at its end, which costs less. All sequences, 1024 at most, are one request and
        are prefilled side by side. ``http_timeout`` bounds it, in seconds.

        Raises:
            ConfigError: ``last`` is below 1.
            TransportError: on use: the deployment answers about other tokens, or without logprobs.
        """
        if last is not None and last < 1:
            raise ConfigError(f"last must be >= 1 or None, got {last}")
        prompts = [list(sequence) for sequence in sequences]
        return CompletionsCall(
            lambda: start(self._score(prompts, last, self._target_within(http_timeout)))
        )

    def score_top_tokens(
        self, sequence: Sequence[int], k: int, *, last: int, http_timeout: float | None = None
    ) -> CompletionsCall[list[tuple[int, float]]]:
        """The model's ``k`` most probable tokens for each of a sequence's ``last`` ones.

        Each is a token id and its logprob before temperature, the likeliest first; nothing is
        sampled. ``http_timeout`` bounds the request, in seconds.

        Raises:
            ConfigError: ``k`` or ``last`` is below 1, or ``last`` includes the first token, which
                nothing stands before.
            TransportError: on use: the deployment answers about other tokens, or with fewer.
        """
        for name, value, most in (("k", k, None), ("last", last, len(sequence) - 1)):
            if value < 1 or (most is not None and value > most):
                bound = "" if most is None else f" and <= {most}"
                raise ConfigError(f"{name} must be >= 1{bound}, got {value}")
        call = CompletionCall(
            model=self.model,
            prompt=[list(sequence)],
            max_tokens=0,
            echo_last=last,
            logprobs=True,
            top_logprobs=k,
            raw_output=True,
        )
        echoed = list(sequence[-last:])
        target = self._target_within(http_timeout)

        async def score() -> list[list[tuple[int, float]]]:
            response = await SamplingRequest(target, _PATH, CompletionResponse).run(call.dump())
            return _read_top_tokens(response.choices[0], echoed, k)

        return CompletionsCall(lambda: start(score()))

    def close(self) -> None:
        """Refuse further calls and close the connections."""
        start(self.target.http.close()).result()

    def _tokenize(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if self.tokenizer is None:
            raise ConfigError(
                "tokenizer must be given to sample from messages, got None: pass "
                "DeploymentSampler(tokenizer=...) or call sample_with_prompt_tokens"
            )
        return tokenize_messages(self.tokenizer, messages)

    def _target_within(self, timeout_s: float | None) -> SamplingTarget:
        return replace(self.target, timeout_s=timeout_s) if timeout_s else self.target

    async def _sample(
        self,
        request: CompletionRequest,
        bodies: Sequence[Mapping[str, Any]],
        target: SamplingTarget,
        limit: float,
    ) -> list[SampledCompletion]:
        async def sample(body: Mapping[str, Any]) -> SampledCompletion:
            sampling = SamplingRequest(target, _PATH, CompletionResponse)
            completion = parse_completion(await sampling.run(orjson.dumps(body)), request)
            return replace(
                completion,
                seed=body.get("seed"),
                started=sampling.sent_at,
                sample_s=time.time() - sampling.sent_at,
            )

        tasks = [asyncio.ensure_future(sample(body)) for body in bodies]
        try:
            completions = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return [completion for completion in completions if len(completion.full_tokens) <= limit]

    async def _score(
        self, sequences: list[list[int]], last: int | None, target: SamplingTarget
    ) -> list[list[float]]:
        if not sequences:
            return []
        call = CompletionCall(
            model=self.model,
            prompt=sequences,
            max_tokens=0,
            echo=last is None,
            echo_last=last,
            logprobs=True,
            logprob_format="arrays",
            encoding="base64",
            raw_output=True,
        )
        response = await SamplingRequest(target, _PATH, CompletionResponse).run(call.dump())
        choices = sorted(response.choices, key=lambda choice: choice.index)
        if len(choices) != len(sequences):
            raise TransportError(
                f"a deployment must answer about each of {len(sequences)} sequences, got "
                f"{len(choices)} answers"
            )
        return [read_scores(*pair, last) for pair in zip(choices, sequences, strict=True)]


def tokenize_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]
) -> list[int]:
    """The prompt's token ids, up to where the answer begins.

    Raises:
        ConfigError: the tokenizer has no chat template.
        Exception: what the template raises about the messages.
    """
    try:
        tokens = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
    except ValueError as error:
        # Asked only now: some tokenizers render messages without a template.
        if getattr(tokenizer, "chat_template", None) is not None:
            raise
        raise ConfigError(
            "tokenizer must have a chat template to sample from messages, got "
            f"{tokenizer.name_or_path!r}, which has none: take that of an instruction-tuned model, "
            "set tokenizer.chat_template, or call sample_with_prompt_tokens"
        ) from error
    return cast("list[int]", tokens)


def read_scores(choice: Choice, sequence: Sequence[int], last: int | None = None) -> list[float]:
    """The logprobs of an echoed sequence's tokens after the first, or of its ``last`` ones.

    Raises:
        TransportError: the choice is about other tokens, or lacks a logprob.
    """
    raw = choice.raw_output
    echoed = list(sequence) if last is None else list(sequence[-last:])
    # Nothing stands before a sequence's first token, so it has no probability.
    rows = (
        None if raw is None else _all_or_none(raw.logprobs, skip=int(len(echoed) == len(sequence)))
    )
    if raw is None or raw.completion_token_ids != echoed or rows is None:
        raise TransportError(
            "a scored sequence must come back with its own tokens and a logprob for each after the "
            "first, got others: the deployment does not support echo with logprobs"
        )
    return rows


def _read_top_tokens(choice: Choice, echoed: list[int], k: int) -> list[list[tuple[int, float]]]:
    """The most probable tokens of each echoed position.

    Raises:
        TransportError: the choice is about other tokens, or lacks some.
    """
    content = [] if choice.logprobs is None else choice.logprobs.content
    tops = [token.top_logprobs or [] for token in content]
    is_about = [token.token_id for token in content] == echoed
    if not is_about or any(len(top) != k for top in tops):
        raise TransportError(
            f"a scored sequence must come back with its own tokens and the {k} most probable at "
            f"each, got {len(content)} of {len(echoed)}: the deployment does not support "
            "top_logprobs of echoed tokens, or has fewer tokens"
        )
    return [[(token.token_id, token.logprob) for token in top] for top in tops]


def completion_seed(seed: int, index: int) -> int:
    """The seed of completion ``index`` of a prompt sampled with ``seed``; below 2**63."""
    return (seed + (index + 1) * _SEED_STRIDE) % 2**63


def parse_completion(response: CompletionResponse, request: CompletionRequest) -> SampledCompletion:
    """The first choice of a response, checked against the request.

    Raises:
        TransportError: token ids are missing, or with ``echo`` do not begin with the prompt; or
            the experts are of another number of tokens.
    """
    choice = response.choices[0]
    prompt = request.prompt if isinstance(request.prompt, list) else []
    if choice.raw_output is None:
        raise TransportError(
            f"model {request.model!r} must answer with raw_output token ids, got none: the "
            "deployment does not support token-in/token-out sampling"
        )
    tokens = choice.raw_output.completion_token_ids
    if request.echo:
        if tokens[: len(prompt)] != prompt:
            raise TransportError("an echoed completion must begin with its prompt, got other ids")
        tokens = tokens[len(prompt) :]
    return SampledCompletion(
        text=choice.text,
        full_tokens=prompt + tokens,
        prompt_len=len(prompt),
        finish_reason=choice.finish_reason,
        inference_logprobs=_read_sampling_logprobs(choice, request.echo),
        raw_logprobs=_all_or_none(choice.raw_output.logprobs, skip=int(request.echo)),
        logprobs_echoed=request.echo,
        weight_version=response.weight_version,
        snapshot_identity=response.snapshot_identity,
        versions=choice.raw_output.versions or [],
        routing_matrices=_read_routing(choice.raw_output, skip=int(request.echo)),
        perf_metrics=response.perf_metrics or {},
    )


def _read_sampling_logprobs(choice: Choice, echo: bool) -> list[float] | None:
    """Sampling logprobs; with ``echo`` the prompt's, which was not sampled, are the model's own."""
    raw = choice.raw_output
    assert raw is not None
    if raw.sampling_logprobs is None:
        return None
    if not echo:
        return _all_or_none(raw.sampling_logprobs, skip=0)
    model_logprobs = raw.logprobs or [None] * len(raw.sampling_logprobs)
    merged = [
        own if sampled is None else sampled
        for sampled, own in zip(raw.sampling_logprobs, model_logprobs, strict=True)
    ]
    return _all_or_none(merged, skip=1)


def _read_routing(raw: RawOutput, *, skip: int) -> list[str] | None:
    """The experts of the sampled tokens, after those of the prompt where these are given."""
    if raw.routing_matrices is None:
        return None
    if len(raw.routing_matrices) != len(raw.completion_token_ids):
        raise TransportError(
            f"routing_matrices must be one per token, {len(raw.completion_token_ids)}, got "
            f"{len(raw.routing_matrices)}: they cannot be replayed"
        )
    own = raw.routing_matrices[skip:]
    return own if skip else [*(raw.prompt_routing_matrices or []), *own]


def _all_or_none(logprobs: list[float | None] | None, *, skip: int) -> list[float] | None:
    if logprobs is None:
        return None
    known = logprobs[skip:]
    try:
        struct.pack(f"{len(known)}d", *known)  # a third of the time that `None in known` takes
    except struct.error:
        return None
    return cast("list[float]", known)
