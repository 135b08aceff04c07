"""From a sampling request to a completion request of a deployment, and back."""

from __future__ import annotations

from typing import Any

import orjson

from hearth.errors import RequestError
from hearth.tinker.protobuf import Sample, TargetLogprobs, TopLogprobs, WireSequence, write_sample
from hearth.wire.tinker_requests import AskSamples

MOST_TOP = 20
"""Of the most probable tokens that are told at one position."""


def read_prompt(ask: AskSamples) -> list[int]:
    """The prompt's token ids.

    Raises:
        RequestError: a chunk is no text.
    """
    tokens: list[int] = []
    for chunk in ask.prompt.chunks:
        own = chunk.get("tokens")
        if chunk.get("type", "encoded_text") != "encoded_text" or not isinstance(own, list):
            raise RequestError(
                f"prompt must be made of encoded_text chunks, got a {chunk.get('type')!r} chunk: "
                "the models here read token ids only"
            )
        tokens += own
    return tokens


def check_samples(ask: AskSamples) -> None:
    """Refuse what would change nothing here.

    Raises:
        RequestError: a field is given that this platform cannot honor, or breaks its rule.
    """
    refused = {
        "prompt_alt_tokens_k": "sample from the prompt's beginnings instead",
        "base_model": "the sampling session names what is sampled from",
        "model_path": "the sampling session names what is sampled from",
    }
    for name, instead in refused.items():
        if value := getattr(ask, name):
            raise RequestError(f"{name} must be absent, got {str(value)[:80]}: {instead}")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(ask, name) <= MOST_TOP:
            raise RequestError(f"{name} must be in 0..{MOST_TOP}, got {getattr(ask, name)}")
    last = ask.prompt_logprobs_last_n
    if last is not None and (not ask.prompt_logprobs or last < 1):
        raise RequestError(
            f"prompt_logprobs_last_n must be >= 1 and go with prompt_logprobs, got {last}"
        )
    top_k = ask.sampling_params.top_k
    if top_k < -1:
        raise RequestError(f"top_k must be -1, 0 or a number of tokens, got {top_k}")


def build_completion(
    ask: AskSamples, prompt: list[int], *, identity: str | None, max_seq_len: int
) -> bytes:
    """The completion request. Logprobs of prompts are those of the model, at temperature 1."""
    params = ask.sampling_params
    stop = params.stop
    is_ids = isinstance(stop, list) and any(isinstance(item, int) for item in stop)
    scores = bool(ask.prompt_logprobs) or ask.topk_prompt_logprobs > 0
    top = max(ask.topk_prompt_logprobs, ask.topk_sample_logprobs)
    max_tokens = params.max_tokens
    body: dict[str, Any] = {
        "prompt": prompt,
        "n": ask.num_samples,
        "max_tokens": max(1, max_seq_len - len(prompt)) if max_tokens is None else max_tokens,
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "seed": params.seed,
        # A list of its own, even an empty one, is all that ends a sequence.
        "ignore_eos": stop is not None,
        "stop": None if is_ids else (stop or None),
        "stop_token_ids": stop if is_ids else None,
        "adapter": identity,
        "logprobs": True,
        "raw_output": True,
        "logprob_format": "objects" if top else "arrays",
        "top_logprobs": top or None,
    }
    if scores and ask.prompt_logprobs_last_n is not None:
        body["echo_last"] = ask.prompt_logprobs_last_n
    elif scores:
        body["echo"] = True
    return orjson.dumps({name: value for name, value in body.items() if value is not None})


def write_samples(
    ask: AskSamples,
    prompt: list[int],
    answer: dict[str, Any],
    target_logprobs: TargetLogprobs | None = None,
) -> bytes:
    """The result of the request, of the completion's answer."""
    echoed = 0
    if ask.prompt_logprobs or ask.topk_prompt_logprobs:
        echoed = ask.prompt_logprobs_last_n or len(prompt)
    is_greedy = ask.sampling_params.temperature == 0
    sequences: list[WireSequence] = []
    prompt_logprobs: list[float | None] = []
    prompt_tops: list[TopLogprobs | None] = []
    for choice in answer["choices"]:
        tokens, own, sampling, tops = _read_choice(choice)
        sequences.append(
            WireSequence(
                tokens=tokens[echoed:],
                logprobs=[_number(value) for value in (own if is_greedy else sampling)[echoed:]],
                is_stopped=choice["finish_reason"] == "stop",
                tops=[(top or [])[: ask.topk_sample_logprobs] for top in tops[echoed:]]
                if ask.topk_sample_logprobs
                else None,
            )
        )
        if not prompt_logprobs:
            missing = len(prompt) - echoed
            prompt_logprobs = [None] * missing + own[:echoed]
            prompt_tops = [None] * missing + [
                None if top is None else top[: ask.topk_prompt_logprobs] for top in tops[:echoed]
            ]
            if echoed == len(prompt):
                prompt_logprobs[:1] = [None] * len(prompt[:1])
    usage = answer.get("perf_metrics") or {}
    return write_sample(
        Sample(
            sequences=sequences,
            prompt_logprobs=prompt_logprobs if ask.prompt_logprobs else None,
            prompt_tops=prompt_tops if ask.topk_prompt_logprobs else None,
            target_logprobs=target_logprobs,
            cached_prompt_tokens=int(usage.get("cached-prompt-tokens", 0)),
            prompt_k=ask.topk_prompt_logprobs,
            sample_k=ask.topk_sample_logprobs,
        )
    )


def _read_choice(
    choice: dict[str, Any],
) -> tuple[list[int], list[float | None], list[float | None], list[TopLogprobs | None]]:
    """Token ids, two logprobs each, and the top lists of a choice, the echoed prompt's first."""
    raw = choice["raw_output"]
    tokens: list[int] = raw["completion_token_ids"]
    if raw.get("logprobs") is not None:
        return tokens, raw["logprobs"], raw["sampling_logprobs"], [None] * len(tokens)
    content = choice["logprobs"]["content"]
    tops: list[TopLogprobs | None] = [
        None
        if each.get("top_logprobs") is None
        else [(top["token_id"], top["logprob"]) for top in each["top_logprobs"]]
        for each in content
    ]
    return (
        tokens,
        [each.get("logprob") for each in content],
        [each.get("sampling_logprob") for each in content],
        tops,
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
