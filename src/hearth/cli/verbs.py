"""The verbs of the ``hearth`` command: where their functions are, and one line of help for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class VerbEntry(NamedTuple):
    """Where a verb's function is, the record of its flags, and what ``hearth --help`` says of it."""

    target: str
    """``module:function``."""
    flags: str
    """The record's name, in the same module."""
    summary: str


VERBS: Mapping[str, VerbEntry] = {
    "quickstart": VerbEntry(
        "training.quickstart.verb:quickstart",
        "QuickstartOptions",
        "Train the shipped model with GRPO and show it before and after.",
    ),
    "train": VerbEntry(
        "training.recipes.rl_loop:command",
        "Config",
        "Train with the rl_loop recipe; every field of its config is a flag.",
    ),
    "view": VerbEntry(
        "hearth.viewer.verb:view",
        "ViewFlags",
        "Show runs, their curves and every sample in the browser, until Ctrl-C.",
    ),
    "show": VerbEntry(
        "training.run.show:show",
        "ShowFlags",
        "Print a run: its reward curve, best and worst samples, why the reward is flat.",
    ),
    "compare": VerbEntry(
        "hearth.viewer.printed:compare",
        "CompareFlags",
        "Print where runs differ: settings, curves, held-out numbers, the first token.",
    ),
    "rescore": VerbEntry(
        "training.run.rescore_verb:rescore",
        "RescoreOptions",
        "Score a run's recorded samples with another reward function, and compare.",
    ),
    "serve": VerbEntry(
        "hearth.cli.serve:serve", "ServeFlags", "Serve a platform on a port, until Ctrl-C."
    ),
    "deploy": VerbEntry(
        "hearth.cli.models:deploy",
        "DeployFlags",
        "Serve a model, or a run's trained model, on the platform.",
    ),
    "chat": VerbEntry(
        "hearth.cli.models:chat",
        "ChatFlags",
        "Talk with a run's trained model, another model, or a deployment.",
    ),
    "ps": VerbEntry(
        "hearth.cli.resources:ps", "PsFlags", "Show the trainer jobs and deployments of a platform."
    ),
    "logs": VerbEntry(
        "hearth.cli.resources:logs",
        "LogsFlags",
        "Show the end of a trainer job's or deployment's log.",
    ),
    "stop": VerbEntry(
        "hearth.cli.resources:stop",
        "IdFlags",
        "Cancel a trainer job, or scale a deployment to zero.",
    ),
    "start": VerbEntry(
        "hearth.cli.resources:start", "IdFlags", "Start a stopped trainer job or deployment again."
    ),
    "plan": VerbEntry(
        "hearth.cli.plan:plan",
        "PlanFlags",
        "Say whether a model fits some GPUs, and which shape to choose.",
    ),
    "doctor": VerbEntry(
        "hearth.cli.doctor:doctor",
        "DoctorFlags",
        "Check this machine: versions, compiler, GPU, memory, ports; train a little.",
    ),
    "completion": VerbEntry(
        "hearth.cli.completion:completion",
        "CompletionFlags",
        "Print what completes verbs and flags: source <(hearth completion bash).",
    ),
    "conformance": VerbEntry(
        "hearth.cli.conformance:conformance",
        "ConformanceFlags",
        "Say how far a server keeps Tinker's API, with a score.",
    ),
}
