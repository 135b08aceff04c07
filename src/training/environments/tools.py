"""An environment's tools: their schemas as OpenAI's API has them, and the calls of an answer."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from hearth.errors import ConfigError
from training.environments.calls import EnvironmentCalls, failure
from training.environments.protocol import LONGEST, Environment
from training.rollouts.failures import DroppedRolloutError

_known: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""Schemas by function, since each episode has methods of its own."""


def tool_schemas(tools: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """The schema of each tool, from its type hints and its docstring.

    Raises:
        ConfigError: a tool lacks them.
    """
    return [_find_schema(tool) for tool in tools]


def _find_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    function = getattr(tool, "__func__", tool)
    if function not in _known:
        from transformers.utils import get_json_schema  # seconds to import

        try:
            _known[function] = get_json_schema(tool)
        except Exception as error:  # of the library's own kinds
            raise ConfigError(
                "tools must be functions with type hints and a docstring whose Args: explain each "
                f"argument, got {getattr(tool, '__name__', tool)!r}: {error}"
            ) from error
    return _known[function]


async def run_tool(calls: EnvironmentCalls, environment: Environment, call: Any) -> str:
    """What the policy is told of its ``call``, one of a message's ``tool_calls``.

    A name, arguments or a value that are wrong are told as an error.

    Raises:
        DroppedRolloutError: the tool failed, or took too long.
    """
    tools = {tool.__name__: tool for tool in environment.tools}
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        if name not in tools:
            raise ValueError(f"tool must be one of {', '.join(tools)}, got {name[:40]!r}")
        given = json.loads(arguments)
        if not isinstance(given, dict):
            raise ValueError(f"arguments must be a JSON object, got {arguments[:40]}")
        inspect.signature(tools[name]).bind(**given)
    except (ValueError, TypeError, RecursionError) as error:  # of the text that the policy wrote
        return f"error: {error}"
    try:
        result = await calls.call(tools[name], **given)
    except DroppedRolloutError as error:
        if isinstance(error.__cause__, ValueError):
            return f"error: {error.__cause__}"[:LONGEST]
        raise
    text = result if isinstance(result, str) else _to_json(name, result)
    return text[:LONGEST]


def _to_json(name: str, result: Any) -> str:
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise failure(name, error) from error
