"""Makes completion responses, and the parts that all kinds of response share. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

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
from hearth.wire.tensors import pack_floats, pack_ids


def completion_response(
    call: CompletionCall,
    prompts: Sequence[list[int]],
    completions: Sequence[SampledSequence],
    *,
    model_name: str,
    tokenizer: Tokenizer | None,
    metrics: dict[str, str],
) -> CompletionResponse:
    """The response to ``call``; its version is the oldest that sampled one of its tokens."""
    oldest = min(completions, key=lambda completion: completion.weight_version)
    choices = [
        _choice(call, prompts[index // call.n], completion, index, tokenizer)
        for index, completion in enumerate(completions)
    ]
    return CompletionResponse.model_construct(
        id=f"cmpl-{new_request_id()}",
        created=int(time.time()),
        model=call.model or model_name,
        choices=choices,
        usage=usage_of(prompts, completions),
        weight_version=oldest.weight_version,
        snapshot_identity=oldest.snapshot_identity,
        perf_metrics=metrics if call.perf_metrics_in_response else None,
    )


def usage_of(prompts: Sequence[list[int]], completions: Sequence[SampledSequence]) -> Usage:
    """Token counts; each prompt counts once, whatever its number of completions."""
    prompt_tokens = sum(map(len, prompts))
    completion_tokens = sum(len(completion.token_ids) for completion in completions)
    return Usage.model_construct(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def perf_metrics(
    prompts: Sequence[list[int]], completions: Sequence[SampledSequence], elapsed_s: float
) -> dict[str, str]:
    """Seconds and counts from which clients control their concurrency, as texts."""
    cached = min(completion.cached_prompt_tokens for completion in completions)
    return {
        "num-concurrent-requests": str(max(each.num_concurrent for each in completions)),
        "prefill-queue-duration": f"{max(each.queue_s for each in completions):.6f}",
        "generation-duration": f"{max(each.generation_s for each in completions):.6f}",
        "prompt-tokens": str(sum(map(len, prompts))),
        "cached-prompt-tokens": str(cached),
        "server-processing-time": f"{elapsed_s:.6f}",
    }


def token_logprobs(
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
    columns = (token_ids, logprobs, sampling_logprobs, tops, experts)
    return [
        TokenLogprob.model_construct(
            token=text_of(token),
            token_id=token,
            # Fireworks' client drops all objects when one has no number, the first included.
            logprob=0.0 if logprob is None else logprob,
            sampling_logprob=sampling_logprob,
            top_logprobs=None if top is None else _top_logprobs(top, text_of),
            routing_matrix=chosen or None,
        )
        for token, logprob, sampling_logprob, top, chosen in zip(*columns, strict=True)
    ]


def _top_logprobs(top: TopLogprobs, text_of: Callable[[int], str]) -> list[TopLogprob]:
    return [
        TopLogprob.model_construct(token=text_of(token), token_id=token, logprob=logprob)
        for token, logprob in top
    ]


def choice_logprobs(
    call: CompletionCall,
    content: list[TokenLogprob],
    logprobs: Sequence[float | None],
    *,
    with_top: bool,
    offset: int = 0,
) -> ChoiceLogprobs:
    """Both forms of the logprobs of a completion's tokens; ``offset`` characters came before."""
    tokens = [token.token for token in content]
    offsets = None
    if not isinstance(call.logprobs, bool):  # OpenAI's number
        offsets = list(accumulate(map(len, tokens), initial=offset))[:-1]
    return ChoiceLogprobs.model_construct(
        content=content,
        tokens=tokens,
        token_logprobs=list(logprobs),
        top_logprobs=[_by_text(token) for token in content] if with_top else None,
        text_offset=offsets,
    )


def token_text(tokenizer: Tokenizer | None) -> Callable[[int], str]:
    """The text of a token alone."""
    if tokenizer is None:
        return lambda token: f"token_id:{token}"
    return lambda token: tokenizer.decode([token])


def _by_text(token: TokenLogprob) -> dict[str, float] | None:
    if token.top_logprobs is None:
        return None
    # Reversed, so that of two tokens with one text the likelier stays.
    logprobs = {top.token: top.logprob for top in reversed(token.top_logprobs)}
    ordered = dict(sorted(logprobs.items(), key=lambda item: -item[1]))
    if token.logprob is not None:
        ordered.setdefault(token.token, token.logprob)
    return ordered


def _choice(
    call: CompletionCall,
    prompt: list[int],
    completion: SampledSequence,
    index: int,
    tokenizer: Tokenizer | None,
) -> Choice:
    arrays = call.logprob_format == "arrays" and wants_logprobs(call)
    objects = call.logprob_format == "objects" and wants_logprobs(call)
    text = completion.text
    echoed = echoed_tokens(call, prompt)
    if echoed and tokenizer is not None:
        text = tokenizer.decode(echoed, skip_special_tokens=True) + text
    return Choice.model_construct(
        index=index,
        text=text,
        finish_reason=completion.finish_reason,
        logprobs=_objects(call, prompt, completion, tokenizer) if objects else None,
        raw_output=_raw(call, prompt, completion, arrays) if call.raw_output or arrays else None,
        token_ids=completion.token_ids if call.return_token_ids else None,
        prompt_token_ids=prompt if call.return_token_ids else None,
    )


def _raw(
    call: CompletionCall, prompt: list[int], completion: SampledSequence, arrays: bool
) -> RawOutput:
    tokens, own, sampling = _tokens_and_logprobs(call, prompt, completion)
    is_packed = call.encoding == "base64"
    ids = pack_ids if is_packed else list[int]
    floats = pack_floats if is_packed else list[float | None]
    return RawOutput.model_construct(
        completion_token_ids=ids(tokens),
        prompt_token_ids=ids(prompt) if is_text(call) else None,
        logprobs=floats(own) if arrays else None,
        sampling_logprobs=floats(sampling) if arrays else None,
        versions=completion.versions,
        routing_matrices=_routing(call, prompt, completion) if arrays else None,
        prompt_routing_matrices=_prompt_routing(call, completion),
    )


def _objects(
    call: CompletionCall,
    prompt: list[int],
    completion: SampledSequence,
    tokenizer: Tokenizer | None,
) -> ChoiceLogprobs:
    tokens, own, sampling = _tokens_and_logprobs(call, prompt, completion)
    count = len(tokens) - len(completion.token_ids)
    tops = [*(completion.prompt_top_logprobs or [None] * count)]
    tops += completion.top_logprobs or [None] * len(completion.token_ids)
    content = token_logprobs(
        tokens, own, sampling, tops, tokenizer, _routing(call, prompt, completion)
    )
    return choice_logprobs(call, content, own, with_top=completion.top_logprobs is not None)


def _tokens_and_logprobs(
    call: CompletionCall, prompt: list[int], completion: SampledSequence
) -> tuple[list[int], list[float | None], list[float | None]]:
    """Tokens, logprobs and sampling logprobs, those of the echoed prompt first."""
    echoed = echoed_tokens(call, prompt)
    if not echoed:
        return completion.token_ids, [*completion.logprobs], [*completion.sampling_logprobs]
    unknown: list[float | None] = [None] * len(echoed)
    return (
        echoed + completion.token_ids,
        [*(completion.prompt_logprobs or unknown), *completion.logprobs],
        [*unknown, *completion.sampling_logprobs],
    )


def _routing(
    call: CompletionCall, prompt: list[int], completion: SampledSequence
) -> list[str] | None:
    """The wire format of the experts of the tokens in ``_tokens_and_logprobs``."""
    if completion.routing is None:
        return None
    own = encode_routing(completion.routing)
    count = len(echoed_tokens(call, prompt))
    if not count:
        return own
    return [*["", *encode_routing(completion.prompt_routing or [])][-count:], *own]


def _prompt_routing(call: CompletionCall, completion: SampledSequence) -> list[str] | None:
    if not call.include_prompt_routing or completion.prompt_routing is None:
        return None
    return encode_routing(completion.prompt_routing)
