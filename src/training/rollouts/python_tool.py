"""A tool with which a policy runs Python, in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.sandbox import Isolation, Limits, run_code

PYTHON_SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Runs a Python program and returns what it prints. Each call begins anew.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The whole program"}},
            "required": ["code"],
        },
    },
}
"""The tool as OpenAI's API describes one."""

_ENDED = {
    "timeout": "it took too long",
    "memory": "it used too much memory",
    "output": "it printed too much",
}


@dataclass(frozen=True)
class PythonTool:
    """Runs the programs that a policy writes. It blocks: await ``asyncio.to_thread(tool, call)``.

    Raises:
        ConfigError: this machine has no sandbox.
    """

    limits: Limits = field(default_factory=Limits)
    max_characters: int = 2000
    """Of what is returned; the middle is left out of more."""
    isolation: Isolation | None = None
    """As ``run_code`` has it."""

    def __call__(self, arguments: Mapping[str, Any]) -> str:
        """What the program printed, for the policy to read.

        Raises:
            ValueError: the call has no ``code``; the text is made for the policy.
        """
        code = arguments.get("code")
        if not isinstance(code, str):
            raise ValueError(f"arguments must hold the code, got {str(dict(arguments))[:40]}")
        result = run_code(code, limits=self.limits, isolation=self.isolation)
        parts = [result.stdout, result.stderr]
        if result.ended != "exited":
            parts.append(f"[ended: {_ENDED[result.ended]}]")
        elif result.exit_code and not result.stderr:
            parts.append(f"[exit code {result.exit_code}]")
        text = "\n".join(part.rstrip() for part in parts if part.strip())
        return _shorten(text, self.max_characters) or "[no output]"


def _shorten(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n[...]\n{text[len(text) - most // 2 :]}"
