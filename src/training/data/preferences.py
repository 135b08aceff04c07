"""Rows of preferences: a prompt, and two answers of which one is better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hearth.errors import ConfigError
from training.data.conversations import (
    Conversation,
    Message,
    encode_conversation,
    read_messages,
    read_tools,
)
from training.data.rows import Row


def encode_pair(tokenizer: Any, row: Row, where: str) -> list[Conversation]:
    """The row's chosen and rejected conversation; only what follows the prompt is marked.

    Raises:
        ConfigError: an answer is missing or malformed, both are the same, or the chat template does
            not tell them from the prompt.
    """
    prompt = row.get("messages")
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError(
            f"{where}.messages must be the prompt, a list of messages, got {repr(prompt)[:80]}: "
            'rows look like {"messages": [{"role": "user", "content": "..."}], '
            '"chosen": "...", "rejected": "..."}'
        )
    # What the assistant has said in the prompt is neither better nor worse.
    read = [_without_weight(message) for message in prompt]
    pair = [
        encode_conversation(
            tokenizer,
            read_messages(read + _read_answer(row, name, where), f"{where}.{name}"),
            read_tools(row, where),
            f"{where}.{name}",
        )
        for name in ("chosen", "rejected")
    ]
    if pair[0].tokens.tolist() == pair[1].tokens.tolist():
        raise ConfigError(f"{where} must have two answers that differ, got one twice")
    return pair


def _without_weight(message: Any) -> Any:
    is_answer = isinstance(message, Mapping) and message.get("role") == "assistant"
    return {**message, "weight": 0} if is_answer else message


def _read_answer(row: Row, name: str, where: str) -> list[Message]:
    answer = row.get(name)
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    if isinstance(answer, list) and answer:
        return answer
    raise ConfigError(
        f"{where}.{name} must be an answer, a text or a list of messages, got {repr(answer)[:80]}"
    )
