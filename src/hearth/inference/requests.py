"""Reads the bodies of completion and chat requests, and refuses options that are not supported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import TypeIs

from hearth.errors import RequestError
from hearth.inference.backend import AdapterSource, SampleRequest, Tokenizer
from hearth.inference.texts import check_length
from hearth.wire.base import parse_json, show
from hearth.wire.chat import ChatRequest
from hearth.wire.completions import CompletionCall, CompletionFields, SamplingFields

MOST_COMPLETIONS = 1024
"""Most completions of one request: ``n`` times its prompts."""
_MOST_NUMBERED_LOGPROBS = 5
_MOST_STOPS = 64
_LONGEST_STOP = 1024
"""Characters of a stop string."""
_MOST_STOP_IDS = 1024
_MOST_TOP_K = 2**31 - 1
"""More than any vocabulary has, so that a higher number asks for the same."""

# The SDK's n requests with n=1 and one request with n return the same completions.
_SEED_STRIDE = 0x9E3779B97F4A7C15

# Fields of OpenAI's, Fireworks' and vLLM's requests that would change the answer, and the values at
# which they do not. Other values are refused, since they would have no effect.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "suffix": ("",),
    "min_p": (0,),
    "min_tokens": (0,),
    "typical_p": (1,),
    "top_a": (0,),
    "mirostat_target": (0,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
    "prompt_truncate_len": (),
    "images": ([],),
    "routing_matrix_format": ("base64_inline",),
    "top_sampling_logprobs": (0,),
    "sampling_mask": (False,),
}
_UNSUPPORTED_IN_CHAT: Mapping[str, tuple[Any, ...]] = {
    "echo": (False,),
    "echo_last": (0,),
    "include_prompt_routing": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
_HINTS = {
    "best_of": "request n completions and choose among them",
    "reasoning_effort": "pass it in chat_template_kwargs, if the model's template knows it",
    "verbosity": "pass it in chat_template_kwargs, if the model's template knows it",
    "tool_choice": "answers are not forced into a form; 'auto' shows the tools to the model",
}


def read_completion(body: bytes) -> CompletionCall:
    """The completion request of a body.

    Raises:
        RequestError: it is not a JSON object, breaks a type, or has an unsupported option.
    """
    content = _content(body)
    _refuse(content, _UNSUPPORTED)
    best_of = content.get("best_of")
    if best_of is not None and best_of != content.get("n", 1):
        raise _make_refusal("best_of", best_of)
    call = CompletionCall.from_dict(content)
    _check_stops(call)
    _check_logprobs(call)
    _check_beside_logprobs(call, wants_logprobs(call))
    _check_echo_last(call)
    _check_prompt_routing(call)
    return call


def read_chat(body: bytes) -> ChatRequest:
    """The chat request of a body.

    Raises:
        RequestError: it is not a JSON object, breaks a type, or has an unsupported option.
    """
    content = _content(body)
    _refuse(content, _UNSUPPORTED)
    _refuse(content, _UNSUPPORTED_IN_CHAT)
    for name in ("reasoning_effort", "verbosity"):
        if name in content:
            raise _make_refusal(name, content[name])
    if content.get("tool_choice", "auto") not in ("auto", "none"):
        raise _make_refusal("tool_choice", content["tool_choice"])
    request = ChatRequest.from_dict(content)
    _check_stops(request)
    _check_beside_logprobs(request, bool(request.logprobs))
    return request


def prompt_ids(
    call: CompletionCall, tokenizer: Tokenizer | None, *, most_bytes: int
) -> list[list[int]]:
    """Token ids of each prompt of a request, tokenized where it is a text.

    Raises:
        RequestError: it is a text of more than ``most_bytes`` bytes, the deployment has no
            tokenizer, or there are more than 1024 completions to sample.
    """
    prompt = call.prompt
    if _is_single(prompt):
        return [prompt]
    prompts = [prompt] if isinstance(prompt, str) else prompt
    _check_count(call, len(prompts))
    return [
        _encode(item, tokenizer, most_bytes) if isinstance(item, str) else item for item in prompts
    ]


def is_text(call: CompletionCall) -> bool:
    """Whether the prompts came as texts."""
    return isinstance(call.prompt, str) or any(isinstance(item, str) for item in call.prompt[:1])


def sample_requests(
    call: CompletionCall,
    prompts: Sequence[list[int]],
    *,
    client: str = "",
    adapter: AdapterSource | None = None,
) -> list[SampleRequest]:
    """The samples of a completion request: ``n`` of the first prompt, then of the second.

    Raises:
        RequestError: there are none, or more than 1024.
    """
    scores_prompt = (call.echo or bool(call.echo_last)) and wants_logprobs(call)
    return _make_requests(
        call,
        prompts,
        max_tokens=call.max_tokens,
        top_logprobs=top_logprobs(call),
        prompt_logprobs=scores_prompt,
        prompt_logprobs_last=call.echo_last or None,
        prompt_top_logprobs=top_logprobs(call) if scores_prompt else 0,
        client=client,
        adapter=adapter,
    )


def echoed_tokens(call: CompletionCall, prompt: list[int]) -> list[int]:
    """The part of a prompt that the answer repeats before the completion."""
    if call.echo:
        return prompt
    return prompt[-call.echo_last :] if call.echo_last else []


def chat_requests(
    request: ChatRequest,
    prompt: list[int],
    *,
    max_seq_len: int,
    client: str = "",
    adapter: AdapterSource | None = None,
    visible_tokens: Sequence[str] = (),
) -> list[SampleRequest]:
    """The ``n`` samples of a chat request; without its own limit they may fill the context.

    ``visible_tokens`` are special tokens that stay in the text.

    Raises:
        RequestError: ``n`` is not in 1..1024, or the two names of the limit differ.
    """
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError(
            f"max_tokens must be absent or equal to max_completion_tokens, got "
            f"{request.max_tokens} and {request.max_completion_tokens}"
        )
    max_tokens = limits.pop() if limits else None
    if max_tokens is None:
        max_tokens = max(1, max_seq_len - len(prompt))
    return _make_requests(
        request,
        [prompt],
        max_tokens=max_tokens,
        top_logprobs=request.top_logprobs or 0,
        visible_tokens=visible_tokens,
        client=client,
        adapter=adapter,
    )


def is_whole(call: CompletionFields) -> bool:
    """Whether one event has the whole answer, even of a stream.

    The official training client buffers its stream, and needs ids that chunks do not have.
    """
    return call.raw_output or call.logprob_format == "arrays"


def wants_logprobs(call: CompletionFields) -> bool:
    """``0`` requests the sampled tokens' logprobs, as in OpenAI's API; ``false`` does not."""
    return call.logprobs is not None and call.logprobs is not False


def top_logprobs(call: CompletionFields) -> int:
    """How many of the most probable tokens are listed at each sampled one; arrays list none."""
    if call.logprob_format == "arrays":
        return 0
    if call.logprobs is None or isinstance(call.logprobs, bool):
        return call.top_logprobs or 0
    return max(call.top_logprobs or 0, call.logprobs)


def _make_requests(
    fields: SamplingFields, prompts: Sequence[list[int]], **options: Any
) -> list[SampleRequest]:
    """``n`` requests of each prompt; ``options`` are fields of ``SampleRequest``."""
    _check_count(fields, len(prompts))
    stop = _stops(fields)
    return [
        SampleRequest(
            prompt=prompt,
            temperature=fields.temperature,
            top_p=fields.top_p,
            top_k=min(fields.top_k, _MOST_TOP_K),
            seed=_seed_of(fields, index),
            stop_token_ids=fields.stop_token_ids or (),
            stop=stop,
            ignore_eos=fields.ignore_eos,
            routing=fields.include_routing_matrix,
            **options,
        )
        # As tuples, which the samples of one prompt share: an engine copies lists.
        for prompt in map(tuple, prompts)
        for index in range(fields.n)
    ]


def _check_count(fields: SamplingFields, num_prompts: int) -> None:
    if not 1 <= fields.n <= MOST_COMPLETIONS:
        raise RequestError(f"n must be in 1..{MOST_COMPLETIONS}, got {fields.n}")
    if fields.n * num_prompts > MOST_COMPLETIONS:
        raise RequestError(
            f"prompt must be at most {MOST_COMPLETIONS // fields.n} prompts for n={fields.n}, got "
            f"{num_prompts}: one request returns up to {MOST_COMPLETIONS} completions"
        )


def _stops(fields: SamplingFields) -> list[str]:
    return [fields.stop] if isinstance(fields.stop, str) else fields.stop or []


def _check_stops(fields: SamplingFields) -> None:
    stops = _stops(fields)
    if len(stops) > _MOST_STOPS:
        raise RequestError(
            f"stop must be at most {_MOST_STOPS} texts, got {len(stops)}: every sampled token is "
            "searched for all of them"
        )
    longest = max(map(len, stops), default=0)
    if longest > _LONGEST_STOP:
        raise RequestError(
            f"stop must be texts of at most {_LONGEST_STOP} characters, got one of {longest}: so "
            "much text is searched again with every sampled token"
        )
    if len(fields.stop_token_ids or ()) > _MOST_STOP_IDS:
        raise RequestError(
            f"stop_token_ids must be at most {_MOST_STOP_IDS} ids, got "
            f"{len(fields.stop_token_ids or ())}: every sampled token is compared with all of them"
        )


def _seed_of(fields: SamplingFields, index: int) -> int | None:
    if fields.seed is None or fields.n == 1:
        return fields.seed
    return (fields.seed + (index + 1) * _SEED_STRIDE) % 2**63


def _is_single(prompt: str | list[int] | list[list[int]] | list[str]) -> TypeIs[list[int]]:
    return not isinstance(prompt, str) and (not prompt or isinstance(prompt[0], int))


def _encode(text: str, tokenizer: Tokenizer | None, most_bytes: int) -> list[int]:
    if tokenizer is None:
        raise RequestError(
            f"prompt must be a list of token ids, got the text {text[:40]!r}: this deployment has "
            "no tokenizer"
        )
    check_length("prompt", text, most_bytes)
    return tokenizer.encode(text)


def _content(body: bytes) -> dict[str, Any]:
    """The body's fields; null means absent, as in OpenAI's API."""
    content = parse_json(body)
    if not isinstance(content, dict):
        raise RequestError(f"body must be a JSON object, got {show(content)!r}")
    return {name: value for name, value in content.items() if value is not None}


def _refuse(content: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    for name in content.keys() & table.keys():
        if content[name] not in table[name]:
            raise _make_refusal(name, content[name])


def _make_refusal(name: str, value: Any) -> RequestError:
    why = _HINTS.get(name, "this deployment does not support it")
    return RequestError(f"{name} must be absent, got {show(value)!r}: {why}")


def _check_logprobs(call: CompletionCall) -> None:
    if not 0 <= (call.logprobs or 0) <= _MOST_NUMBERED_LOGPROBS:
        raise RequestError(
            f"logprobs must be true, false or in 0..{_MOST_NUMBERED_LOGPROBS}, got "
            f"{call.logprobs}: use logprobs=true with top_logprobs for more"
        )


def _check_beside_logprobs(fields: CompletionCall | ChatRequest, has_logprobs: bool) -> None:
    if fields.top_logprobs and not has_logprobs:
        raise RequestError(
            f"logprobs must be true when top_logprobs is given, got top_logprobs="
            f"{fields.top_logprobs}"
        )
    if fields.top_logprobs and fields.logprob_format == "arrays":
        raise RequestError(
            f"top_logprobs must be absent with logprob_format='arrays', got {fields.top_logprobs}: "
            "arrays hold one number per token"
        )
    if fields.include_routing_matrix and not has_logprobs:
        raise RequestError(
            "logprobs must be true when include_routing_matrix is given, got none: the experts of "
            "a token are listed beside its logprob"
        )


def _check_echo_last(call: CompletionCall) -> None:
    if not call.echo_last:
        return
    if call.echo_last < 0:
        raise RequestError(f"echo_last must be >= 0, got {call.echo_last}")
    if call.echo:
        raise RequestError(
            "echo must be false with echo_last, got true: it echoes the whole prompt"
        )
    if call.stream and not is_whole(call):
        raise RequestError("stream must be false with echo_last, got true: ask without it")


def _check_prompt_routing(call: CompletionCall) -> None:
    if call.include_prompt_routing and not (call.include_routing_matrix and call.raw_output):
        raise RequestError(
            "include_prompt_routing must come with include_routing_matrix and raw_output, got it "
            "alone: it adds to their output"
        )
    if call.include_routing_matrix and call.echo and call.stream and not is_whole(call):
        raise RequestError(
            "echo must be false where experts are streamed, got true: only a whole answer has "
            "those of the prompt; set raw_output"
        )
