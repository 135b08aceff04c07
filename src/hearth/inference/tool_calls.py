"""Tool calls in the text of an answer, read by transformers' parser of chat responses.

A response template says how a model writes its calls: the tokenizer's own, or one of three that
its chat template tells apart.

    <tool_call>                              <tool_call>                    {"name": "add",
    {"name": "add", "arguments": {...}}      <function=add>                  "parameters": {...}}
    </tool_call>                             <parameter=a>
                                             2
    Hermes, Qwen                             </parameter>                   Llama
                                             </function>
                                             </tool_call>   Qwen3.5, Qwen3-Coder

Only parses text; other modules decide what is sampled and sent.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hearth.inference.backend import Tokenizer
from hearth.inference.texts import special_tokens
from hearth.wire.chat import ChatFinishReason, ChatRequest, FunctionCall, ToolCall
from hearth.wire.completions import FinishReason

_REASONING = {"reasoning_content": {"open": "<think>", "close": "</think>"}}
_ANCHOR = {"start_anchor": "<|im_start|>assistant\n"}
# The newline before a call is the template's, which writes it again when the call is sent back.
_HERMES = {
    **_ANCHOR,
    "fields": {
        **_REASONING,
        "tool_calls": {
            "open_pattern": r"\n?<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
    },
}
_XML = {
    **_ANCHOR,
    "fields": {
        **_REASONING,
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            "transform": {
                "type": "function",
                "function": {"name": "{name}", "arguments": "{content}"},
            },
        },
    },
}
_LLAMA = {
    "start_anchor": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"\A\s*(?:<\|python_tag\|>)?\s*(?=\{)",
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        }
    },
}
_CALLS = "tool_calls"
_PROMPT_TOKENS = 32
"""The last tokens of a prompt, in which its template may have begun the answer."""
_KEPT = 64
"""Characters before the place of reading that a pattern may look back at."""


@dataclass
class ParsedText:
    """The parsed part of an answer: the text outside its calls, and the calls."""

    content: str = ""
    calls: list[FunctionCall] = field(default_factory=list[FunctionCall])


class CallForm:
    """How a model writes its calls and its reasoning, from a response template."""

    def __init__(self, template: Mapping[str, Any]) -> None:
        # Importing transformers takes two seconds.
        from transformers.utils.chat_parsing.response_templates import load_response_template

        loaded = load_response_template(dict(template))
        self.regions = [part for part in loaded.fields.values() if part.open_re is not None]
        """What an answer has beside its content: calls, and mostly reasoning."""
        self._template = loaded
        calls = {**template["fields"][_CALLS], "optional": True}
        self._calls = load_response_template(
            {**template, "defaults": {}, "fields": {_CALLS: calls}}
        )
        self._written = "".join(_find_texts(calls)).replace("\\", "")

    def skip_to_answer(self, prompt: str) -> str:
        """What the end of a prompt has of the answer already, such as an opened reasoning."""
        begun = self._template.truncate_past_last_anchor(prompt)
        return "" if begun == prompt else begun

    def visible_tokens(self, tokenizer: Tokenizer | None) -> tuple[str, ...]:
        """The special tokens of a tokenizer that a call is written with."""
        return tuple(token for token in special_tokens(tokenizer) if token in self._written)

    def parse(self, span: str, tools: Sequence[Mapping[str, Any]]) -> list[FunctionCall]:
        """The calls of a span, with arguments of the types that the tools say; none if it is bad.

        One that cannot be sent on is: with infinite numbers, lone surrogates, or no object.
        """
        from transformers.utils.chat_parsing import parse_response

        try:
            message = parse_response(span, self._calls, prefix="", tools=[*map(dict, tools)])
            return [*map(_read_call, _flatten(message.get(_CALLS)))]
        # A tokenizer's response template is its own, and may make the parser raise any error.
        except Exception:  # noqa: BLE001
            return []


class ToolCallReader:
    """Parses a growing text; the returned parts together are the whole answer.

    Text is returned as soon as it cannot be the beginning of a call. A newline behind a call is not
    content: the template writes it again when the call is sent back. What is no valid call stays
    text, and so do a call that is never closed and whatever stands in the reasoning.

    ``prompt`` is the end of the prompt, where a template may have begun the answer.
    """

    def __init__(
        self, form: CallForm, tools: Sequence[Mapping[str, Any]] = (), prompt: str = ""
    ) -> None:
        self._form = form
        self._tools = tools
        self._text = ""
        self._place = 0
        self._region: Any = None
        self._is_after_call = False
        self.push(form.skip_to_answer(prompt))
        self._text, self._place = "", 0

    def push(self, text: str) -> ParsedText:
        """The next part, once ``text`` is appended."""
        self._text += text
        parsed = ParsedText()
        while self._advance(parsed):
            pass
        if self._place > 64 * _KEPT:
            self._text = self._text[self._place - _KEPT :]
            self._place = _KEPT
        return parsed

    def finish(self) -> ParsedText:
        """The rest, once the text has ended."""
        self._skip_newline()
        parsed = ParsedText()
        opened = self._find_open(partial=False)
        if opened is not None and opened[0].close_re is None and opened[0].name == _CALLS:
            parsed.calls = self._form.parse(self._text[opened[1].start() :], self._tools)
            if parsed.calls:
                self._release(parsed, opened[1].start())
                return parsed
        self._release(parsed, len(self._text))
        return parsed

    def read(self, text: str) -> ParsedText:
        """A whole answer."""
        parsed, rest = self.push(text), self.finish()
        return ParsedText(parsed.content + rest.content, parsed.calls + rest.calls)

    def _advance(self, parsed: ParsedText) -> bool:
        """Move the text and call that are certain into ``parsed``; whether there may be more."""
        self._skip_newline()
        if self._region is not None:
            return self._pass_region(parsed)
        opened = self._find_open(partial=True)
        if opened is None:
            return False
        region, found = opened
        if found.partial:
            self._release(parsed, found.start())
            return False
        if region.name != _CALLS:
            self._release(parsed, found.end())
            self._region = region
            return True
        closed = region.close_re and region.close_re.search(self._text, found.end())
        if not closed:
            self._release(parsed, found.start())
            return False
        calls = self._form.parse(self._text[found.start() : closed.end()], self._tools)
        if not calls:
            # Only the opening is certain: behind one that was never closed there may be a call.
            self._release(parsed, max(found.end(), self._place + 1))
            return True
        self._release(parsed, found.start())
        self._place = closed.end()
        self._is_after_call = True
        parsed.calls += calls
        return True

    def _pass_region(self, parsed: ParsedText) -> bool:
        """Move a region that is content, such as reasoning; whether it has ended."""
        close = self._region.close_re
        closed = close and close.search(self._text, self._place, partial=True)
        if closed and not closed.partial:
            self._release(parsed, closed.end())
            self._region = None
            return True
        self._release(parsed, closed.start() if closed else len(self._text))
        return False

    def _find_open(self, *, partial: bool) -> tuple[Any, Any] | None:
        """The region that opens first, and its match; one that only may open if ``partial``."""
        found = [
            (region, match)
            for region in self._form.regions
            if (match := region.open_re.search(self._text, self._place, partial=partial))
        ]
        return min(found, key=lambda pair: pair[1].start(), default=None)

    def _release(self, parsed: ParsedText, end: int) -> None:
        parsed.content += self._text[self._place : end]
        self._place = max(self._place, end)

    def _skip_newline(self) -> None:
        if self._is_after_call and self._place < len(self._text):
            self._place += self._text.startswith("\n", self._place)
            self._is_after_call = False


def start_reader(
    request: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer | None
) -> ToolCallReader | None:
    """A reader of an answer's calls; None where no tools were offered."""
    if not request.offered_tools or tokenizer is None:
        return None
    end = tokenizer.decode(list(prompt[-_PROMPT_TOKENS:]))
    return ToolCallReader(find_form(tokenizer), request.offered_tools, end)


def visible_tokens(request: ChatRequest, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """Special tokens that the text of an answer keeps, as its calls are written with them."""
    if not request.offered_tools or tokenizer is None:
        return ()
    return find_form(tokenizer).visible_tokens(tokenizer)


@functools.lru_cache(maxsize=8)
def find_form(tokenizer: Tokenizer) -> CallForm:
    """The form of a tokenizer's model; Hermes' where nothing says another."""
    own = getattr(tokenizer, "response_template", None)
    if isinstance(own, Mapping) and _CALLS in own.get("fields", {}):
        return CallForm(own)
    chat_template = str(getattr(tokenizer, "chat_template", ""))
    if "<function=" in chat_template:
        return CallForm(_XML)
    if "<tool_call>" not in chat_template and "<|start_header_id|>" in chat_template:
        return CallForm(_LLAMA)
    return CallForm(_HERMES)


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


def _read_call(call: Mapping[str, Any]) -> FunctionCall:
    function = call["function"]
    name = function["name"]
    arguments = function["parameters" if "parameters" in function else "arguments"]
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError(f"a call must have a name and an object of arguments, got {call}")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    (name + text).encode()
    return FunctionCall(name=name, arguments=text)


def _flatten(calls: Any) -> Iterator[Mapping[str, Any]]:
    """The calls of a message, some of whose entries may be lists of several."""
    for call in calls if isinstance(calls, list) else [calls]:
        if isinstance(call, list):
            yield from call
        else:
            yield call


def _find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | Sequence):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _find_texts(item)
