"""Draws as completion responses, and what every kind of response is made of. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hearth.inference.backend import SampledSequence, Tokenizer, TopLogprobs
from hearth.inference.requests import echoed_tokens, is_text, wants_logprobs
from hearth.telemetry import new_request_id
from hearth.wire.completions import (
    Choice,
    ChoiceLogprobs,
    CompletionCall,
    CompletionResponse,
    RawOutput,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from hearth.wire.routing import encode_routing


def completion_response(
    call: CompletionCall,
    prompts: Sequence[list[int]],
    drawn: Sequence[SampledSequence],
    *,
    model_name: str,
    tokenizer: Tokenizer | None,
    metrics: dict[str, str],
) -> CompletionResponse:
    """The response to ``call``; its version is the oldest that drew one of its tokens."""
    oldest = min(drawn, key=lambda one: one.weight_version)
    choices = [
        _choice(call, prompts[index // call.n], one, index, tokenizer)
        for index, one in enumerate(drawn)
    ]
    return CompletionResponse.model_construct(
        id=f"cmpl-{new_request_id()}",
        created=int(time.time()),
        model=call.model or model_name,
        choices=choices,
        usage=usage_of(prompts, drawn),
        weight_version=oldest.weight_version,
        snapshot_identity=oldest.snapshot_identity,
        perf_metrics=metrics if call.perf_metrics_in_response else None,
    )


def usage_of(prompts: Sequence[list[int]], drawn: Sequence[SampledSequence]) -> Usage:
    """Token counts; each prompt counts once, however often it was continued."""
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(one.token_ids) for one in drawn)
    return Usage.model_construct(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def perf_metrics(
    prompts: Sequence[list[int]], drawn: Sequence[SampledSequence], elapsed_s: float
) -> dict[str, str]:
    """What clients steer their concurrency by: seconds and counts, as texts."""
    return {
        "num-concurrent-requests": str(max(one.num_concurrent for one in drawn)),
        "prefill-queue-duration": f"{max(one.queue_s for one in drawn):.6f}",
        "generation-duration": f"{max(one.generation_s for one in drawn):.6f}",
        "prompt-tokens": str(sum(map(len, prompts))),
        "cached-prompt-tokens": str(min(one.cached_prompt_tokens for one in drawn)),
        "server-processing-time": f"{elapsed_s:.6f}",
    }


def token_rows(
    token_ids: Sequence[int],
    logprobs: Sequence[float | None],
    sampling_logprobs: Sequence[float | None],
    tops: Sequence[TopLogprobs | None],
    tokenizer: Tokenizer | None,
    routing: Sequence[str] | None = None,
) -> list[TokenLogprob]:
    """One object per token."""
    text_of = token_text(tokenizer)
    experts = routing or [""] * len(token_ids)
    rows = zip(token_ids, logprobs, sampling_logprobs, tops, experts, strict=True)
    return [
        TokenLogprob.model_construct(
            token=text_of(token),
            token_id=token,
            # Fireworks' client drops all rows when one has no number, the first included.
            logprob=0.0 if logprob is None else logprob,
            sampling_logprob=drawn_from,
            top_logprobs=None if top is None else top_rows(top, text_of),
            routing_matrix=chosen or None,
        )
        for token, logprob, drawn_from, top, chosen in rows
    ]


def top_rows(top: TopLogprobs, text_of: Callable[[int], str]) -> list[TopLogprob]:
    """The most probable tokens at one position, likeliest first."""
    return [
        TopLogprob.model_construct(token=text_of(token), token_id=token, logprob=logprob)
        for token, logprob in top
    ]


def choice_logprobs(
    content: list[TokenLogprob], token_logprobs: Sequence[float | None], *, with_top: bool
) -> ChoiceLogprobs:
    """Both forms of the logprobs of a completion's tokens."""
    return ChoiceLogprobs.model_construct(
        content=content,
        tokens=[row.token for row in content],
        token_logprobs=list(token_logprobs),
        top_logprobs=[_by_text(row) for row in content] if with_top else None,
    )


def token_text(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """The text of a token alone."""
    if tokenizer is None:
        return lambda token: f"token_id:{token}"
    return lambda token: tokenizer.decode([token])


def _by_text(row: TokenLogprob) -> dict[str, float] | None:
    if row.top_logprobs is None:
        return None
    # Reversed, so that of two tokens with one text the likelier stays.
    found = {logprob.token: logprob.logprob for logprob in reversed(row.top_logprobs)}
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
    if row.logprob is not None:
        ordered.setdefault(row.token, row.logprob)
    return ordered


def _choice(
    call: CompletionCall,
    prompt: list[int],
    drawn: SampledSequence,
    index: int,
    tokenizer: Tokenizer | None,
) -> Choice:
    arrays = call.logprob_format == "arrays" and wants_logprobs(call)
    objects = call.logprob_format == "objects" and wants_logprobs(call)
    text = drawn.text
    echoed = echoed_tokens(call, prompt)
    if echoed and tokenizer is not None:
        text = tokenizer.decode(echoed, skip_special_tokens=True) + text
    return Choice.model_construct(
        index=index,
        text=text,
        finish_reason=drawn.finish_reason,
        logprobs=_objects(call, prompt, drawn, tokenizer) if objects else None,
        raw_output=_raw(call, prompt, drawn, arrays) if call.raw_output or arrays else None,
    )


def _raw(
    call: CompletionCall, prompt: list[int], drawn: SampledSequence, arrays: bool
) -> RawOutput:
    tokens, own, sampling = _rows(call, prompt, drawn)
    return RawOutput.model_construct(
        completion_token_ids=tokens,
        prompt_token_ids=prompt if is_text(call) else None,
        logprobs=own if arrays else None,
        sampling_logprobs=sampling if arrays else None,
        versions=drawn.versions,
        routing_matrices=_routing(call, prompt, drawn) if arrays else None,
        prompt_routing_matrices=_prompt_routing(call, drawn),
    )


def _objects(
    call: CompletionCall, prompt: list[int], drawn: SampledSequence, tokenizer: Tokenizer | None
) -> ChoiceLogprobs:
    tokens, own, sampling = _rows(call, prompt, drawn)
    tops = [*([None] * (len(tokens) - len(drawn.token_ids)))]
    tops += drawn.top_logprobs or [None] * len(drawn.token_ids)
    content = token_rows(tokens, own, sampling, tops, tokenizer, _routing(call, prompt, drawn))
    return choice_logprobs(content, own, with_top=drawn.top_logprobs is not None)


def _rows(
    call: CompletionCall, prompt: list[int], drawn: SampledSequence
) -> tuple[list[int], list[float | None], list[float | None]]:
    """Tokens, logprobs and sampling logprobs, those of the echoed prompt first."""
    echoed = echoed_tokens(call, prompt)
    if not echoed:
        return drawn.token_ids, [*drawn.logprobs], [*drawn.sampling_logprobs]
    unknown: list[float | None] = [None] * len(echoed)
    return (
        echoed + drawn.token_ids,
        [*(drawn.prompt_logprobs or unknown), *drawn.logprobs],
        [*unknown, *drawn.sampling_logprobs],
    )


def _routing(call: CompletionCall, prompt: list[int], drawn: SampledSequence) -> list[str] | None:
    """The experts of the tokens that ``_rows`` gives, as the wire has them."""
    if drawn.routing is None:
        return None
    own = encode_routing(drawn.routing)
    count = len(echoed_tokens(call, prompt))
    if not count:
        return own
    return [*["", *encode_routing(drawn.prompt_routing or [])][-count:], *own]


def _prompt_routing(call: CompletionCall, drawn: SampledSequence) -> list[str] | None:
    if not call.include_prompt_routing or drawn.prompt_routing is None:
        return None
    return encode_routing(drawn.prompt_routing)
