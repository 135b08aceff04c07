"""Games of Gymnasium whose actions can be written (``pip install 'hearth-rl[gymnasium]'``).

``gymnasium:ID`` or ``gymnasium:MODULE:ID``. Actions are texts, or whole numbers below n, which the
policy writes alone or in ``<answer>`` tags. ``environment_args`` are those of ``gymnasium.make``,
and ``instructions`` (told before the first observation), ``actions`` (names of the numbers) and
``max_turns``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
from gymnasium import spaces

from hearth.errors import ConfigError
from training.config.named import see_current_folder
from training.environments.protocol import Environment, Step
from training.environments.tasks import EpisodeTasks
from training.rewards.answers import marked_answer

MAX_TURNS = 20
"""Where the game's own specification has no limit."""
_HIGHLIGHT = re.compile(r"\x1b\[\d+m(.)\x1b\[0m")


def find_tasks(name: str, task: str, args: Mapping[str, Any]) -> EpisodeTasks:
    """The game of that id, one task for each seed.

    Raises:
        ConfigError: there is none, its actions cannot be written, or it does not take the
            arguments.
    """
    see_current_folder()
    options = dict(args)
    own = {key: options.pop(key) for key in ("instructions", "actions", "max_turns") if key in args}
    try:
        game = gymnasium.make(task, **options)
        kinds = game.metadata.get("render_modes") or []
        if "ansi" in kinds and not isinstance(game.observation_space, spaces.Text):
            options.setdefault("render_mode", "ansi")
        game.close()
    except Exception as error:  # of the library's own kinds, or whatever a game raises
        raise ConfigError(
            f"environment must be a game of Gymnasium made with {options!r}, got {name!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    space = game.action_space
    if not isinstance(space, spaces.Text | spaces.Discrete):
        raise ConfigError(
            f"environment must have actions that are texts or numbers below n, got {name!r} with "
            f"{space}"
        )
    names = own.get("actions")
    if names is not None and not (isinstance(space, spaces.Discrete) and len(names) == space.n):
        raise ConfigError(f"actions must be one name for each of {space}, got {names!r}")
    return EpisodeTasks(name, partial(GymnasiumGame, task, options, **own))


class GymnasiumGame(Environment):
    """One game. A text that is no action changes nothing but takes a turn."""

    def __init__(
        self,
        task: str,
        options: Mapping[str, Any],
        *,
        instructions: str = "",
        actions: Sequence[str] | None = None,
        max_turns: int | None = None,
    ) -> None:
        self.game = gymnasium.make(task, **options)
        self.instructions = instructions
        self.actions = [name.lower() for name in actions] if actions is not None else None
        limit = self.game.spec.max_episode_steps if self.game.spec is not None else None
        self.max_turns = max_turns or limit or MAX_TURNS

    def reset(self, seed: int) -> str:
        """The instructions, how to answer, and the first observation."""
        observation, _ = self.game.reset(seed=seed)
        told = [self.instructions, self._say_how(), self._describe(observation)]
        return "\n\n".join(text for text in told if text)

    def step(self, answer: str) -> Step:
        """The next observation and the game's own reward."""
        action = self._read(answer)
        if action is None:
            return Step(self._say_how(), parsed=False)
        observation, reward, is_terminated, is_truncated, _ = self.game.step(action)
        is_over = bool(is_terminated or is_truncated)
        return Step(self._describe(observation), float(reward), is_over, parsed=True)

    def close(self) -> None:
        """Close the game."""
        self.game.close()

    def _say_how(self) -> str:
        space = self.game.action_space
        if self.actions is not None:
            return f"Answer with one of: {', '.join(self.actions)}."
        if isinstance(space, spaces.Discrete):
            start = int(space.start)
            return f"Answer with a number from {start} to {start + int(space.n) - 1}."
        return ""

    def _read(self, answer: str) -> Any:
        """The action that a text names; None where it names none."""
        said = marked_answer(answer)
        text = (answer if said is None else said).strip()
        space = self.game.action_space
        if not isinstance(space, spaces.Discrete):
            return text if space.contains(text) else None
        if self.actions is not None:
            place = text.lower().rstrip(".")
            return self.actions.index(place) if place in self.actions else None
        try:
            number = int(text)
        except ValueError:
            return None
        return number if space.contains(number) else None

    def _describe(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        drawn = self.game.render() if self.game.render_mode == "ansi" else None
        # Toy games color the place where one stands.
        return _HIGHLIGHT.sub(r"[\1]", drawn) if isinstance(drawn, str) else str(observation)
