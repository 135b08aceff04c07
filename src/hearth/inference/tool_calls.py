"""Tool calls in the text of an answer, in the form of Hermes and Qwen models.

    <tool_call>
    {"name": "add", "arguments": {"a": 2, "b": 3}}
    </tool_call>

Text in, text and calls out; what is drawn, shown or sent is decided elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from hearth.wire.chat import ChatFinishReason, FunctionCall, ToolCall
from hearth.wire.completions import FinishReason

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
TAGS = (OPEN, CLOSE)
_STARTS = (OPEN, "\n" + OPEN)
"""What a span may begin with: templates put each on a line of its own."""


@dataclass
class Read:
    """What has been read of an answer: the text outside its calls, and the calls."""

    content: str = ""
    calls: list[FunctionCall] = field(default_factory=list[FunctionCall])


class ToolCallReader:
    """Reads a growing text; all that it returns together is the whole answer.

    Text comes out as soon as it cannot be the beginning of a span. One newline before a span and
    one after it are the template's, which puts them there again when the call is sent back, so
    they are no content. A span that holds no call stays text as it was drawn, and so does one
    that is never closed. The first closing tag ends a span, also one inside a JSON text.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_after_call = False

    def push(self, text: str) -> Read:
        """What the next piece of text lets out."""
        self._held += text
        read = Read()
        while self._take_span(read):
            pass
        return read

    def finish(self) -> Read:
        """What is left once the text has ended."""
        self._skip_newline()
        rest, self._held = self._held, ""
        return Read(rest)

    def _take_span(self, read: Read) -> bool:
        """Move what is decided into ``read``; whether there may be more."""
        self._skip_newline()
        start = self._held.find(OPEN)
        if start < 0:
            self._let_out(read, len(self._held) - _unfinished(self._held))
            return False
        before = len(self._held[:start].removesuffix("\n"))
        end = self._held.find(CLOSE, start)
        if end < 0:
            self._let_out(read, before)
            return False
        call = _call(self._held[start + len(OPEN) : end])
        if call is None:
            # Only the tag is decided: behind one that was never closed there may be a whole span.
            self._let_out(read, start + len(OPEN))
            return True
        self._let_out(read, before)
        self._held = self._held[end + len(CLOSE) - before :]
        self._is_after_call = True
        read.calls.append(call)
        return True

    def _let_out(self, read: Read, size: int) -> None:
        read.content += self._held[:size]
        self._held = self._held[size:]

    def _skip_newline(self) -> None:
        if self._is_after_call and self._held:
            self._held = self._held.removeprefix("\n")
            self._is_after_call = False


def read_tool_calls(text: str) -> Read:
    """A whole answer."""
    reader = ToolCallReader()
    read = reader.push(text)
    read.content += reader.finish().content
    return read


def tool_call(function: FunctionCall, prompt: Sequence[int], choice: int, place: int) -> ToolCall:
    """Call number ``place`` of an answer with its id, which depends on the prompt's tokens.

    So a conversation's calls have different ids, and those of two runs with one seed the same,
    whatever the template makes of them.
    """
    text = f"{list(prompt)}/{choice}/{place}"
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return ToolCall.model_construct(id=f"call_{digest}", function=function)


def chat_finish_reason(reason: FinishReason, *, has_calls: bool) -> ChatFinishReason:
    """``tool_calls`` for an answer that ended by itself with calls; one that was cut says so."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def _call(body: str) -> FunctionCall | None:
    """The call inside a span; None where there is none."""
    try:
        content = json.loads(body, parse_constant=_refuse)
        if not isinstance(content, dict):
            return None
        name, arguments = content.get("name"), content.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        # What could not be sent on is no call either: infinite numbers, halves of characters,
        # nesting without end.
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):
        return None
    return FunctionCall(name=name, arguments=text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


def _unfinished(text: str) -> int:
    """Length of the end of ``text`` that a span may begin with."""
    longest = min(len(text), max(map(len, _STARTS)))
    sizes = range(longest, 0, -1)
    return next((size for size in sizes if any(s.startswith(text[-size:]) for s in _STARTS)), 0)
