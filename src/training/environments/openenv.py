"""Environments of OpenEnv 0.3, which a server plays (``pip install 'hearth-rl[openenv]'``).

``openenv:http://HOST:PORT``. ``environment_args``: ``action`` and ``observation`` name the field
that the policy writes and the one that it is told; where the server's schema has one text of each,
that is it. Without such a field the policy writes the action as JSON, and is told the observation
as JSON. ``instructions`` are told first; ``max_turns`` (10) bounds an episode; ``sessions`` (1) is
how many episodes the server plays side by side; ``timeout_s`` (600) bounds a call with its wait for
a session.
"""

# Its library may want other versions than the tests' environment has (make test-environments).
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import httpx
from openenv.core.generic_client import GenericEnvClient

from hearth.errors import ConfigError
from training.environments.protocol import Environment, Step
from training.environments.tasks import EpisodeTasks
from training.rewards.answers import marked_answer

_NOT_TOLD = ("done", "reward", "metadata")
_OPTIONS = ("action", "observation", "instructions", "max_turns", "sessions", "timeout_s")
_READERS: Mapping[str, Any] = {"string": str, "integer": int, "number": float}


def find_tasks(name: str, url: str, args: Mapping[str, Any]) -> EpisodeTasks:
    """The environment that a server plays, one task for each seed.

    Raises:
        ConfigError: no such server answers, or a field is none of its.
    """
    unknown = sorted(args.keys() - set(_OPTIONS))
    if unknown:
        raise ConfigError(
            f"environment_args of {name} must be {', '.join(_OPTIONS)}, got {', '.join(unknown)}"
        )
    try:
        answer = httpx.get(f"{url.rstrip('/')}/schema", timeout=30.0)
        schema: Any = answer.raise_for_status().json()
        actions = _list_fields(schema["action"])
        observations = _list_fields(schema["observation"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise ConfigError(
            f"environment must be the address of an OpenEnv server that answers, got {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    options = dict(args)
    options["action"] = _choose_field("action", args.get("action"), actions)
    options["observation"] = _choose_field("observation", args.get("observation"), observations)
    kind = actions.get(options["action"] or "")
    return EpisodeTasks(
        name, partial(OpenEnvSession, url, reader=_READERS.get(kind or ""), **options)
    )


def _list_fields(schema: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a record and their types."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    return {
        name: kind.get("type", "") for name, kind in properties.items() if name not in _NOT_TOLD
    }


def _choose_field(role: str, given: str | None, fields: Mapping[str, str]) -> str | None:
    if given is not None and given not in fields:
        raise ConfigError(f"{role} must be one of {', '.join(fields)}, got {given!r}")
    texts = [name for name, kind in fields.items() if kind == "string"]
    only = texts[0] if len(texts) == 1 and (role == "observation" or len(fields) == 1) else None
    return given or only


_rooms: WeakKeyDictionary[Any, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()
"""Sessions that are free, by event loop and server."""


class OpenEnvSession(Environment):
    """One session on the server."""

    def __init__(
        self,
        url: str,
        *,
        action: str | None = None,
        observation: str | None = None,
        reader: Any = None,
        instructions: str = "",
        max_turns: int = 10,
        sessions: int = 1,
        timeout_s: float = 600.0,
    ) -> None:
        self.url = url
        self.action = action
        self.observation = observation
        self.reader = reader
        self.instructions = instructions
        self.max_turns = max_turns
        self.sessions = sessions
        self.timeout_s = timeout_s
        self.client: GenericEnvClient | None = None
        self.room: asyncio.Semaphore | None = None

    async def reset(self, seed: int) -> str:
        """The instructions and the first observation."""
        rooms = _rooms.setdefault(asyncio.get_running_loop(), {})
        room = rooms.setdefault(self.url, asyncio.Semaphore(self.sessions))
        await room.acquire()
        self.room = room
        client = self.client = GenericEnvClient(self.url, message_timeout_s=self.timeout_s)
        result = await client.reset(seed=seed)
        told = [self.instructions, self._describe(result.observation)]
        return "\n\n".join(text for text in told if text)

    async def step(self, answer: str) -> Step:
        """The next observation and the server's reward; a text that is no action takes a turn."""
        assert self.client is not None, "reset comes first"
        action = self._read(answer)
        if action is None:
            return Step("That is no action.", parsed=False)
        result = await self.client.step(action)
        return Step(
            self._describe(result.observation),
            float(result.reward or 0.0),
            result.done,
            parsed=True,
        )

    async def close(self) -> None:
        """End the session."""
        try:
            if self.client is not None:
                await self.client.close()
        finally:
            if self.room is not None:
                self.room.release()
                self.room = None

    def _read(self, answer: str) -> dict[str, Any] | None:
        if self.action is not None and self.reader is str:
            return {self.action: answer}
        said = marked_answer(answer)
        text = answer if said is None else said
        try:
            if self.action is not None and self.reader is not None:
                return {self.action: self.reader(text)}
            value = json.loads(text)
        except ValueError:
            return None
        if self.action is not None:
            return {self.action: value}
        return value if isinstance(value, dict) else None

    def _describe(self, observation: Mapping[str, Any]) -> str:
        if self.observation is not None:
            return str(observation.get(self.observation, ""))
        told = {name: value for name, value in observation.items() if name not in _NOT_TOLD}
        return json.dumps(told, ensure_ascii=False)
