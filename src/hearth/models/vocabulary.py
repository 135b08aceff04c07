"""Checks that a tokenizer belongs to a model.

Trainers and deployments see token ids alone, so they cannot notice a tokenizer of another model:
prompts would be noise to the model, and rewards, ratios and KL would be meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hearth.errors import ConfigError
from hearth.models.loading import load_tokenizer


def check_tokenizer(
    tokenizer: Any,
    name: str,
    source: str,
    *,
    field: str = "tokenizer",
    trust_remote_code: bool = False,
) -> None:
    """Refuse a tokenizer of another model than that of ``source``, a folder or hub id.

    If the model comes with a tokenizer, a token that both know must have one id, and there must be
    such tokens; more or fewer tokens than the model's are fine. Without, each id must be a row of
    the model's embedding. A model that cannot be read is not checked: loading it reports why.

    Raises:
        ConfigError: ``field``, whose value is ``name``, names a tokenizer that does not fit.
    """
    if name == source:
        return
    ids: dict[str, int] = tokenizer.get_vocab()
    own = _read_vocabulary(source, trust_remote_code)
    fault = _compare_ids(ids, own) if own else _compare_embedding(ids, source)
    if fault is not None:
        raise ConfigError(
            f"{field} must be the tokenizer of {source!r}, got {name!r}: {fault}; the model sees "
            "token ids alone"
        )


def _read_vocabulary(source: str, trust_remote_code: bool) -> dict[str, int]:
    """The ids of the tokenizer beside the model; empty where there is none."""
    try:
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    except ConfigError:
        return {}
    ids: dict[str, int] = tokenizer.get_vocab()
    # From a model's config alone transformers builds a tokenizer with special tokens only.
    return ids if ids.keys() - set(tokenizer.all_special_tokens) else {}


def _compare_ids(ids: Mapping[str, int], own: Mapping[str, int]) -> str | None:
    """The difference of two vocabularies in one sentence; None if they agree."""
    shared = ids.keys() & own.keys()
    if not shared:
        return "the two have no token in common"
    other = [token for token in shared if ids[token] != own[token]]
    if not other:
        return None
    first = min(other, key=lambda token: own[token])
    return (
        f"{len(other)} of {len(shared)} tokens in common have another id, the first is {first!r}, "
        f"{ids[first]} instead of {own[first]}"
    )


def _compare_embedding(ids: Mapping[str, int], source: str) -> str | None:
    """The excess of the ids over the model's embedding in one sentence; None if they fit."""
    import transformers  # takes two seconds, and only this case needs it

    try:
        config, _ = transformers.PretrainedConfig.get_config_dict(source)
    except (OSError, ValueError):
        return None
    rows = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    largest = max(ids.values(), default=-1)
    if rows is None or largest < rows:
        return None
    return f"its ids go to {largest}, and the model's embedding has {rows} rows"
