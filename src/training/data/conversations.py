"""Conversations as token ids, and which of them the assistant says: what SFT is trained on.

The chat template alone says where an answer begins and ends. Each answer is what its rendering adds
to the prompt that a sampler would be given before it, so that a model is trained on what it will
continue. Text behind the answer's last end token, such as a line break, is not part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hearth.errors import ConfigError
from training.data.rows import Row, check_message

Message = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Conversation:
    """A conversation of N tokens."""

    tokens: NDArray[np.int32]
    """Token ids [N]."""
    is_said: NDArray[np.bool_]
    """Which of them belong to an answer that is trained, [N]."""

    def __len__(self) -> int:
        return len(self.tokens)


def read_messages(messages: Any, where: str) -> list[Message]:
    """The messages themselves if the last one is the assistant's and the first one is not.

    The assistant's may have ``tool_calls`` instead of a text, and ``weight`` 0: it is not trained.

    Raises:
        ConfigError: they are none, or a message is malformed.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or len(messages) < 2:
        raise ConfigError(
            f"{where} must be a list of messages that ends with the assistant's, got "
            f"{repr(messages)[:80]}: rows look like "
            '{"messages": [{"role": "user", "content": "..."}, '
            '{"role": "assistant", "content": "..."}]}'
        )
    for place, message in enumerate(messages):
        check_message(message, f"{where}[{place}]", may_call=True)
        if message.get("weight", 1) not in (0, 1):
            raise ConfigError(
                f"{where}[{place}].weight must be 0 or 1, got {message['weight']!r}: answers of "
                "weight 0 are not trained"
            )
    for place, is_answer in ((0, False), (-1, True)):
        if (messages[place]["role"] == "assistant") != is_answer:
            which, rule = ("last", "be") if is_answer else ("first", "not be")
            raise ConfigError(
                f"{where} must {rule} the assistant's in its {which} message, got "
                f"{messages[place]['role']!r}"
            )
    return list(messages)


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], tools: Sequence[Any] | None, where: str
) -> Conversation:
    """Token ids of a conversation, in which each answer of weight 1 is marked.

    Raises:
        ConfigError: there is no chat template, it refuses the messages, or it does not tell where
            an answer begins and ends; or no answer is left to train.
    """
    plain = [{name: value for name, value in m.items() if name != "weight"} for m in messages]
    trained = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and message.get("weight", 1)
    ]
    if not trained:
        raise ConfigError(f"{where} must have an answer of weight 1, got none")
    try:
        spans = _find_answers(tokenizer, plain, trained, tools)
    except ConfigError:
        raise
    except Exception as error:  # a template is a program of the model's, and may raise any
        raise ConfigError(
            f"{where} must be what the chat template of {tokenizer.name_or_path!r} takes, got "
            f"{type(error).__name__}: {error}"
        ) from error
    text, answers = spans
    if answers is None:
        raise ConfigError(
            f"{where} must be rendered in one way whether or not more follows, got a chat template "
            f"({tokenizer.name_or_path!r}) that changes an answer or its prompt later: the mask "
            'would be wrong; give earlier answers "weight": 0, or a row for each answer'
        )
    return _encode_pieces(tokenizer, text, answers, where)


def _find_answers(
    tokenizer: Any, messages: list[dict[str, Any]], trained: list[int], tools: Sequence[Any] | None
) -> tuple[str, list[tuple[int, int]] | None]:
    """The rendered text, and where in it the trained answers are; None where it does not tell."""
    render = partial(tokenizer.apply_chat_template, tokenize=False, tools=tools or None)
    text: str = render(messages)
    end_token = tokenizer.eos_token or ""
    spans: list[tuple[int, int]] = []
    for place in trained:
        prompt = render(messages[:place], add_generation_prompt=True)
        answered = text if place == len(messages) - 1 else render(messages[: place + 1])
        start, end = len(prompt), len(answered)
        if not (text.startswith(answered) and answered.startswith(prompt) and start < end):
            return text, None
        last = text.rfind(end_token, start, end) if end_token else -1
        spans.append((start, end if last < 0 else last + len(end_token)))
    return text, spans


def _encode_pieces(
    tokenizer: Any, text: str, answers: list[tuple[int, int]], where: str
) -> Conversation:
    """The text's tokens, cut where an answer begins or ends, as a sampler's prompt is cut there.

    Raises:
        ConfigError: the tokenizer makes another text of the pieces.
    """
    encode = partial(tokenizer.encode, add_special_tokens=False)
    cuts = [0, *(place for span in answers for place in span), len(text)]
    pieces = [encode(text[start:end]) for start, end in pairwise(cuts)]
    tokens = [token for piece in pieces for token in piece]
    if tokenizer.decode(tokens) != tokenizer.decode(encode(text)):
        raise ConfigError(
            f"{where} must read the same when prompt and answer are tokenized apart, got another "
            f"text from the tokenizer {tokenizer.name_or_path!r}: its chat template must end "
            "prompts at a token's end"
        )
    lengths = [len(piece) for piece in pieces]
    is_said = np.repeat(np.arange(len(pieces)) % 2 == 1, lengths)
    return Conversation(np.asarray(tokens, dtype=np.int32), is_said)


def read_tools(row: Row, where: str) -> Sequence[Any] | None:
    """The row's ``tools``, which the chat template is given.

    Raises:
        ConfigError: they are no list.
    """
    tools = row.get("tools")
    if (tools is not None and not isinstance(tools, Sequence)) or isinstance(tools, str):
        raise ConfigError(f"{where}.tools must be a list of functions' schemas, got {tools!r}")
    return tools
