"""Tokens to training datums, and the sampler's logprobs and experts to one value per token.

A datum of N tokens is target-aligned: it has N - 1 values, of which value t is about token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import tinker
import torch
from numpy.typing import NDArray

from hearth.errors import ConfigError
from hearth.sdk import RoutedModelInput, SampledCompletion

DEFAULT_MAX_SEQ_LEN = 8192


def datum_from_tokens_weights(
    tokens: Sequence[int] | torch.Tensor,
    weights: Sequence[float] | torch.Tensor,
    max_length: int | None = None,
    routing: Sequence[str] | None = None,
) -> tinker.Datum:
    """A datum over the first ``max_length`` tokens, shifted by one.

    The input is ``tokens[:-1]``; ``target_tokens`` and ``weights`` are those of ``tokens[1:]``.
    Weights are never rescaled, and a datum without any is kept. ``routing`` has one text per token
    of ``tokens[:-1]``, as ``align_routing`` gives it.

    Raises:
        ConfigError: the lists differ in length, or fewer than 2 tokens remain.
    """
    ids = np.asarray(_to_cpu(tokens), dtype=np.int64)
    values = np.asarray(_to_cpu(weights), dtype=np.float32)
    if len(ids) != len(values):
        raise ConfigError(
            f"weights must have one entry per token, got {len(values)} for {len(ids)}"
        )
    if routing is not None and len(routing) != len(ids) - 1:
        raise ConfigError(
            f"routing must have one entry per input token, got {len(routing)} for {len(ids) - 1}"
        )
    if max_length is not None:
        ids, values = ids[:max_length], values[:max_length]
    if len(ids) < 2:
        raise ConfigError(f"tokens must hold at least 2 ids, got {len(ids)}: no target is left")
    return make_datum(ids[:-1].tolist(), targets=ids[1:], weights=values[1:], routing=routing)


def make_datum(
    tokens: list[int],
    *,
    targets: NDArray[np.int64],
    weights: NDArray[np.float32],
    routing: Sequence[str] | None = None,
) -> tinker.Datum:
    """A datum of N - 1 input ``tokens`` and as many target-aligned values, which are not checked.

    ``routing`` has one text per input token; further ones are left out.
    """
    length = len(tokens)
    # Constructed, not validated: pydantic would look at every id.
    chunk = tinker.EncodedTextChunk.model_construct(tokens=tokens, type="encoded_text")
    model_input = tinker.ModelInput(chunks=[chunk])
    if routing is not None:
        model_input = RoutedModelInput(
            chunks=model_input.chunks, routing_matrices=list(routing[:length])
        )
    return tinker.Datum(
        model_input=model_input,
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=targets, dtype="int64", shape=[length]),
            "weights": tinker.TensorData(data=weights, dtype="float32", shape=[length]),
        },
    )


def completion_datum(
    full_tokens: Sequence[int], prompt_len: int, max_length: int | None = None
) -> tinker.Datum:
    """A datum whose weights are 0 on the prompt and 1 on the completion.

    Raises:
        ConfigError: ``prompt_len`` is not between 1 and the number of tokens.
    """
    if not 1 <= prompt_len <= len(full_tokens):
        raise ConfigError(
            f"prompt_len must be in [1, {len(full_tokens)}], got {prompt_len}: it counts the "
            "prompt's tokens in full_tokens, and the first token is never a target"
        )
    weights = [0.0] * prompt_len + [1.0] * (len(full_tokens) - prompt_len)
    return datum_from_tokens_weights(full_tokens, weights, max_length)


def build_grpo_datums(
    sampled_completions: Sequence[SampledCompletion], max_seq_len: int = DEFAULT_MAX_SEQ_LEN
) -> list[tinker.Datum]:
    """One datum per completion, as document 003 builds them: prompt 0, completion 1.

    Keeps the first ``max_seq_len`` tokens and then shifts: ``max_seq_len - 1`` targets are left.
    """
    return [
        completion_datum(completion.full_tokens, completion.prompt_len, max_seq_len)
        for completion in sampled_completions
    ]


def token_logprobs(
    logprobs: Sequence[float | None] | None,
    *,
    num_tokens: int,
    prompt_len: int,
    is_echoed: bool = False,
) -> list[float]:
    """The sampler's logprobs of a sequence of N tokens, one per token; 0 where it gave none.

    Four forms are accepted: N values beginning with None (echo); N + 1 such values, the last about
    a token that was generated beside an echoed prefill and is left out; one value per completion
    token, N - ``prompt_len`` of them; and, when ``is_echoed``, N - 1 values whose leading None is
    already gone. Any other length is an error: a list that is off by one would train silently.

    Raises:
        ConfigError: nothing was given, the length fits no form, or a completion token has None.
    """
    if not 1 <= prompt_len <= num_tokens:
        raise ConfigError(f"prompt_len must be in [1, {num_tokens}], got {prompt_len}")
    num_sampled = num_tokens - prompt_len
    if logprobs is None or (not logprobs and num_sampled):
        raise ConfigError(
            f"behavior logprobs must be given for {num_sampled} completion tokens, got "
            f"{logprobs!r}: sample with logprobs=True"
        )
    values = list(logprobs)
    has_leading_none = bool(values) and values[0] is None
    if has_leading_none and len(values) in (num_tokens, num_tokens + 1):
        before, sampled = values[:prompt_len], values[prompt_len:num_tokens]
    elif is_echoed and len(values) == num_tokens - 1:
        before, sampled = [None, *values[: prompt_len - 1]], values[prompt_len - 1 :]
    elif not is_echoed and len(values) == num_sampled:
        before, sampled = [None] * prompt_len, values
    else:
        form = "None first" if has_leading_none else "no leading None"
        raise ConfigError(
            f"behavior logprobs must be {num_tokens} or {num_tokens + 1} values with None first, "
            f"{num_sampled} of the completion, or {num_tokens - 1} echoed ones without the None, "
            f"got {len(values)} with {form} (is_echoed={is_echoed}): they would be off by one"
        )
    if None in sampled:
        raise ConfigError(
            "behavior logprobs must be numbers on completion tokens, got None for token "
            f"{prompt_len + sampled.index(None)} of {num_tokens}"
        )
    own = [0.0 if value is None else float(value) for value in before]
    return own + list(map(float, cast("list[float]", sampled)))


def align_routing(
    routing: Sequence[str], *, num_tokens: int, prompt_len: int, with_prompt: bool = False
) -> list[str]:
    """The sampler's experts of a sequence of N tokens as N - 1 texts, one per input token.

    Two forms are accepted: N - 1 texts, and N - ``prompt_len`` of them, one per token from the
    first sampled one on. Without ``with_prompt`` the prompt's own (the first ``prompt_len`` - 1)
    are left empty: there the trainer's router decides.

    Raises:
        ConfigError: the length fits neither form.
    """
    texts = list(routing)
    blank = [""] * (prompt_len - 1)
    if prompt_len > 1 and len(texts) == num_tokens - prompt_len:
        texts = blank + texts
    if len(texts) != num_tokens - 1:
        raise ConfigError(
            f"routing_matrices must be {num_tokens - 1}, one per token but the last, or "
            f"{num_tokens - prompt_len}, one per sampled token, got {len(texts)}: they would be "
            "replayed at other tokens"
        )
    return texts if with_prompt else blank + texts[len(blank) :]


def _to_cpu(values: Sequence[float] | torch.Tensor) -> Sequence[float] | NDArray[np.float64]:
    return values.detach().cpu().double().numpy() if isinstance(values, torch.Tensor) else values
