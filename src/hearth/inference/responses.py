"""Completion requests as draws, and draws as completion responses. Pure functions of records."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hearth.errors import RequestError
from hearth.inference.backend import SampledSequence, SampleRequest, Tokenizer
from hearth.telemetry import new_request_id
from hearth.wire.completions import (
    Choice,
    ChoiceLogprobs,
    CompletionRequest,
    CompletionResponse,
    RawOutput,
    TokenLogprob,
    Usage,
)

MOST_COMPLETIONS = 1024
"""Largest ``n`` of one request."""

# The SDK's n requests with n=1 and one request with n draw the same completions.
_SEED_STRIDE = 0x9E3779B97F4A7C15


def prompt_ids(request: CompletionRequest, tokenizer: Tokenizer | None) -> list[int]:
    """The prompt's token ids, tokenized when it is a text.

    Raises:
        RequestError: it is a text and the deployment has no tokenizer.
    """
    if not isinstance(request.prompt, str):
        return request.prompt
    if tokenizer is None:
        raise RequestError(
            f"prompt must be a list of token ids, got the text {request.prompt[:40]!r}: this "
            "deployment has no tokenizer"
        )
    return tokenizer.encode(request.prompt)


def sample_requests(request: CompletionRequest, prompt: Sequence[int]) -> list[SampleRequest]:
    """The ``n`` draws of a request; each has a seed of its own made from the request's.

    Raises:
        RequestError: ``n`` is not in 1..1024.
    """
    if not 1 <= request.n <= MOST_COMPLETIONS:
        raise RequestError(f"n must be in 1..{MOST_COMPLETIONS}, got {request.n}")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return [
        SampleRequest(
            prompt=prompt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=_seed_of(request, index),
            stop_token_ids=request.stop_token_ids or (),
            stop=stop,
            ignore_eos=request.ignore_eos,
            prompt_logprobs=request.echo and _wants_logprobs(request),
        )
        for index in range(request.n)
    ]


def completion_response(
    request: CompletionRequest,
    prompt: list[int],
    drawn: Sequence[SampledSequence],
    *,
    model_name: str,
    tokenizer: Tokenizer | None,
    metrics: dict[str, str],
) -> CompletionResponse:
    """The response to ``request``; its version is the oldest that drew one of its tokens."""
    oldest = min(drawn, key=lambda one: one.weight_version)
    completion_tokens = sum(len(one.token_ids) for one in drawn)
    choices = [_choice(request, prompt, one, index, tokenizer) for index, one in enumerate(drawn)]
    return CompletionResponse.model_construct(
        id=f"cmpl-{new_request_id()}",
        created=int(time.time()),
        model=request.model or model_name,
        choices=choices,
        usage=Usage.model_construct(
            prompt_tokens=len(prompt),
            completion_tokens=completion_tokens,
            total_tokens=len(prompt) + completion_tokens,
        ),
        weight_version=oldest.weight_version,
        snapshot_identity=oldest.snapshot_identity,
        perf_metrics=metrics if request.perf_metrics_in_response else None,
    )


def perf_metrics(
    prompt: Sequence[int], drawn: Sequence[SampledSequence], elapsed_s: float
) -> dict[str, str]:
    """What clients steer their concurrency by: seconds and counts, as texts."""
    return {
        "num-concurrent-requests": str(max(one.num_concurrent for one in drawn)),
        "prefill-queue-duration": f"{max(one.queue_s for one in drawn):.6f}",
        "generation-duration": f"{max(one.generation_s for one in drawn):.6f}",
        "prompt-tokens": str(len(prompt)),
        "cached-prompt-tokens": str(min(one.cached_prompt_tokens for one in drawn)),
        "server-processing-time": f"{elapsed_s:.6f}",
    }


def _seed_of(request: CompletionRequest, index: int) -> int | None:
    if request.seed is None or request.n == 1:
        return request.seed
    return (request.seed + (index + 1) * _SEED_STRIDE) % 2**63


def _wants_logprobs(request: CompletionRequest) -> bool:
    """``0`` asks for the drawn tokens' logprobs, as in OpenAI's API; ``false`` does not."""
    return request.logprobs is not None and request.logprobs is not False


def _choice(
    request: CompletionRequest, prompt: list[int], drawn: SampledSequence, index: int,
    tokenizer: Tokenizer | None,
) -> Choice:  # fmt: skip
    arrays = request.logprob_format == "arrays" and _wants_logprobs(request)
    objects = request.logprob_format == "objects" and _wants_logprobs(request)
    text = drawn.text
    if request.echo and tokenizer is not None:
        text = tokenizer.decode(prompt, skip_special_tokens=True) + text
    return Choice.model_construct(
        index=index,
        text=text,
        finish_reason=drawn.finish_reason,
        logprobs=_objects(request, prompt, drawn, tokenizer) if objects else None,
        raw_output=_raw(request, prompt, drawn, arrays) if request.raw_output or arrays else None,
    )


def _raw(
    request: CompletionRequest, prompt: list[int], drawn: SampledSequence, arrays: bool
) -> RawOutput:
    tokens, own, sampling = _rows(request, prompt, drawn)
    return RawOutput.model_construct(
        completion_token_ids=tokens,
        prompt_token_ids=prompt if isinstance(request.prompt, str) else None,
        logprobs=own if arrays else None,
        sampling_logprobs=sampling if arrays else None,
        versions=[[drawn.weight_version, len(drawn.token_ids)]] if drawn.token_ids else [],
    )


def _objects(
    request: CompletionRequest, prompt: list[int], drawn: SampledSequence,
    tokenizer: Tokenizer | None,
) -> ChoiceLogprobs:  # fmt: skip
    tokens, own, sampling = _rows(request, prompt, drawn)
    text_of = _token_text(tokenizer)
    texts = [text_of(token) for token in tokens]
    content = [
        TokenLogprob.model_construct(
            token=text,
            token_id=token,
            # Fireworks' client drops all rows when one has no number, the first included.
            logprob=0.0 if logprob is None else logprob,
            sampling_logprob=drawn_from,
        )
        for text, token, logprob, drawn_from in zip(texts, tokens, own, sampling, strict=True)
    ]
    return ChoiceLogprobs.model_construct(content=content, tokens=texts, token_logprobs=own)


def _rows(
    request: CompletionRequest, prompt: list[int], drawn: SampledSequence
) -> tuple[list[int], list[float | None], list[float | None]]:
    """Tokens, logprobs and sampling logprobs, with ``echo`` those of the prompt first."""
    if not request.echo:
        return drawn.token_ids, [*drawn.logprobs], [*drawn.sampling_logprobs]
    unknown: list[float | None] = [None] * len(prompt)
    return (
        prompt + drawn.token_ids,
        [*(drawn.prompt_logprobs or unknown), *drawn.logprobs],
        [*unknown, *drawn.sampling_logprobs],
    )


def _token_text(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    if tokenizer is None:
        return lambda token: f"token_id:{token}"
    return lambda token: tokenizer.decode([token])
