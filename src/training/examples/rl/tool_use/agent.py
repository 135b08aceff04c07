"""An agent with tools, as anybody writes it against OpenAI's API.

Nothing here knows that the model is in training: no token, no logprob, no version. The client that
it is given decides which model answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from openai import AsyncOpenAI
from openai.types.chat import (
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)

MAX_TURNS = 4
"""Answers that the model gives at most, the last one included."""


@dataclass(frozen=True)
class Tool:
    """``schema`` as OpenAI's API has it; ``run`` maps a call's arguments to the result's text.

    It raises ValueError, with a text for the model, where there is no result.
    """

    schema: Mapping[str, Any]
    run: Callable[[Mapping[str, Any]], str]


@dataclass
class Outcome:
    """How a conversation ended."""

    answer: str = ""
    """The text of the last message; empty where the model still called tools when it was ended."""
    tool_calls: int = 0
    """Calls that were answered, the failed ones included."""
    failed_calls: int = 0
    """Calls that were answered with an error."""


async def solve(
    client: AsyncOpenAI,
    messages: Sequence[Mapping[str, str]],
    tools: Mapping[str, Tool],
    *,
    model: str = "policy",
    max_turns: int = MAX_TURNS,
) -> Outcome:
    """Let the model answer, running the tools it calls, until it calls none.

    Raises:
        openai.OpenAIError: the model does not answer.
    """
    conversation = [cast("ChatCompletionMessageParam", dict(message)) for message in messages]
    schemas = [cast("ChatCompletionToolParam", dict(tool.schema)) for tool in tools.values()]
    outcome = Outcome()
    for _ in range(max_turns):
        completion = await client.chat.completions.create(
            model=model, messages=conversation, tools=schemas
        )
        choice = completion.choices[0]
        if choice.finish_reason != "tool_calls":
            outcome.answer = choice.message.content or ""
            break
        said = choice.message.model_dump(exclude_none=True)
        conversation.append(cast("ChatCompletionMessageParam", said))
        for call in choice.message.tool_calls or []:
            if isinstance(call, ChatCompletionMessageFunctionToolCall):
                result = _result(call.function.name, call.function.arguments, tools, outcome)
                conversation.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return outcome


def _result(name: str, arguments: str, tools: Mapping[str, Tool], outcome: Outcome) -> str:
    """What the model is told of its call; it is counted."""
    outcome.tool_calls += 1
    try:
        if name not in tools:
            raise ValueError(f"tool must be one of {', '.join(tools)}, got {name[:40]!r}")
        given = json.loads(arguments)
        if not isinstance(given, dict):
            raise ValueError(f"arguments must be a JSON object, got {arguments[:40]}")
        return tools[name].run(cast("dict[str, Any]", given))
    except ValueError as error:  # a text that is no JSON raises one too
        outcome.failed_calls += 1
        return f"error: {error}"
