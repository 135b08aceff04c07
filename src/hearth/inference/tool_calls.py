"""Tool calls in the text of an answer, in the form of Hermes and Qwen models.

    <tool_call>
    {"name": "add", "arguments": {"a": 2, "b": 3}}
    </tool_call>

Only parses text; other modules decide what is sampled and sent.
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
"""How a span may begin: templates put each on a line of its own."""


@dataclass
class ParsedText:
    """The parsed part of an answer: the text outside its calls, and the calls."""

    content: str = ""
    calls: list[FunctionCall] = field(default_factory=list[FunctionCall])


class ToolCallReader:
    """Parses a growing text; the returned parts together are the whole answer.

    Text is returned as soon as it cannot be the beginning of a span. One newline before a span and
    one after it are not content: the template adds them again when the call is sent back. A span
    without a valid call stays text, and so does one that is never closed. The first closing tag
    ends a span, even inside a JSON string.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_after_call = False

    def push(self, text: str) -> ParsedText:
        """The next part, once ``text`` is appended."""
        self._held += text
        parsed = ParsedText()
        while self._take_span(parsed):
            pass
        return parsed

    def finish(self) -> ParsedText:
        """The rest, once the text has ended."""
        self._skip_newline()
        rest, self._held = self._held, ""
        return ParsedText(rest)

    def _take_span(self, parsed: ParsedText) -> bool:
        """Move the text and call that are certain into ``parsed``; whether there may be more."""
        self._skip_newline()
        start = self._held.find(OPEN)
        if start < 0:
            self._release(parsed, len(self._held) - _find_unfinished(self._held))
            return False
        before = len(self._held[:start].removesuffix("\n"))
        end = self._held.find(CLOSE, start)
        if end < 0:
            self._release(parsed, before)
            return False
        call = _call(self._held[start + len(OPEN) : end])
        if call is None:
            # Only the tag is certain: after one that was never closed there may be a whole span.
            self._release(parsed, start + len(OPEN))
            return True
        self._release(parsed, before)
        self._held = self._held[end + len(CLOSE) - before :]
        self._is_after_call = True
        parsed.calls.append(call)
        return True

    def _release(self, parsed: ParsedText, size: int) -> None:
        parsed.content += self._held[:size]
        self._held = self._held[size:]

    def _skip_newline(self) -> None:
        if self._is_after_call and self._held:
            self._held = self._held.removeprefix("\n")
            self._is_after_call = False


def read_tool_calls(text: str) -> ParsedText:
    """Parse a whole answer."""
    reader = ToolCallReader()
    parsed = reader.push(text)
    parsed.content += reader.finish().content
    return parsed


def tool_call(function: FunctionCall, prompt: Sequence[int], choice: int, place: int) -> ToolCall:
    """Call number ``place`` of an answer with its id, a hash of the prompt's tokens.

    The calls of a conversation thus have different ids, and two runs with one seed the same ids.
    """
    text = f"{list(prompt)}/{choice}/{place}"
    digest = hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
    return ToolCall.model_construct(id=f"call_{digest}", function=function)


def chat_finish_reason(reason: FinishReason, *, has_calls: bool) -> ChatFinishReason:
    """``tool_calls`` for an answer with calls that ended by itself; otherwise ``reason``."""
    return "tool_calls" if has_calls and reason == "stop" else reason


def _call(body: str) -> FunctionCall | None:
    """The call inside a span; None for invalid ones."""
    try:
        content = json.loads(body, parse_constant=_refuse)
        if not isinstance(content, dict):
            return None
        name, arguments = content.get("name"), content.get("arguments")
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return None
        # A call that cannot be sent on is invalid: infinite numbers, lone surrogates, too deep.
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        (name + text).encode()
    except (ValueError, RecursionError):
        return None
    return FunctionCall(name=name, arguments=text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


def _find_unfinished(text: str) -> int:
    """Length of the end of ``text`` that a span may begin with."""
    longest = min(len(text), max(map(len, _STARTS)))
    sizes = range(longest, 0, -1)
    return next((size for size in sizes if any(s.startswith(text[-size:]) for s in _STARTS)), 0)
