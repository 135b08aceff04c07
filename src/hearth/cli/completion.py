"""``hearth completion``: a script that completes verbs and flags in a shell."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Annotated, Any, Literal

import tyro

from hearth.cli.verbs import VERBS


@dataclass(frozen=True, kw_only=True)
class CompletionFlags:
    """Print what completes verbs and flags: source <(hearth completion bash)."""

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """The shell to print it for: source <(hearth completion bash)."""


def completion(arguments: list[str]) -> int:
    """Print what completes verbs and flags: source <(hearth completion bash)."""
    flags = tyro.cli(CompletionFlags, args=arguments, prog="hearth completion")
    verbs: list[Any] = []
    for name, verb in VERBS.items():
        module, _, record = verb.flags.partition(":")
        kind = getattr(import_module(module), record)
        verbs.append(Annotated[kind, tyro.conf.subcommand(name, prefix_name=False)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # defaults that are no literals concern no completion
        # tyro prints the script and ends the program.
        tyro.cli(reduce(or_, verbs), args=["--tyro-print-completion", flags.shell], prog="hearth")
    return 0
