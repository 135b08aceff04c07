"""The verbs of the ``hearth`` command: where their functions are, and one line of help for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class VerbEntry(NamedTuple):
    """Where a verb's function is, the record of its flags, and its line of ``hearth --help``."""

    target: str
    """``module:function``."""
    flags: str
    """``module:record``."""
    summary: str


VERBS: Mapping[str, VerbEntry] = {
    "quickstart": VerbEntry(
        "training.quickstart.verb:quickstart",
        "training.quickstart.verb:QuickstartOptions",
        "Train the shipped model with GRPO and show it before and after.",
    ),
    "train": VerbEntry(
        "training.run.train_verb:train",
        "training.recipes.rl_loop:Config",
        "Train: hearth train [rl|async|igpo|sft|dpo|distill] [@FILE.toml] [--SETTING VALUE ...].",
    ),
    "view": VerbEntry(
        "hearth.viewer.verb:view",
        "hearth.viewer.verb:ViewFlags",
        "Show runs, their curves and every sample in the browser, until Ctrl-C.",
    ),
    "show": VerbEntry(
        "training.run.show:show",
        "training.run.show:ShowFlags",
        "Print a run: its reward curve, best and worst samples, why the reward is flat.",
    ),
    "compare": VerbEntry(
        "hearth.viewer.printed:compare",
        "hearth.viewer.printed:CompareFlags",
        "Print where runs differ: settings, curves, held-out numbers, the first token.",
    ),
    "eval": VerbEntry(
        "training.run.eval_verb:evaluate",
        "training.run.eval_verb:EvalOptions",
        "Sample answers of models, score them, and compare: pass@k with intervals.",
    ),
    "rescore": VerbEntry(
        "training.run.rescore_verb:rescore",
        "training.run.rescore_verb:RescoreOptions",
        "Score a run's recorded samples with another reward function, and compare.",
    ),
    "serve": VerbEntry(
        "hearth.cli.serve:serve",
        "hearth.cli.serve:ServeFlags",
        "Serve a platform on a port, until Ctrl-C.",
    ),
    "deploy": VerbEntry(
        "hearth.cli.models:deploy",
        "hearth.cli.models:DeployFlags",
        "Serve a model, or a run's trained model, on the platform.",
    ),
    "chat": VerbEntry(
        "hearth.cli.models:chat",
        "hearth.cli.models:ChatFlags",
        "Talk with a run's trained model, another model, or a deployment.",
    ),
    "push": VerbEntry(
        "hearth.cli.push:push",
        "hearth.cli.push:PushFlags",
        "Push a run's trained model to the Hugging Face hub, as a private repository.",
    ),
    "ps": VerbEntry(
        "hearth.cli.resources:ps",
        "hearth.cli.resources:PsFlags",
        "Show the trainer jobs and deployments of a platform.",
    ),
    "logs": VerbEntry(
        "hearth.cli.resources:logs",
        "hearth.cli.resources:LogsFlags",
        "Show the end of a trainer job's or deployment's log.",
    ),
    "stop": VerbEntry(
        "hearth.cli.resources:stop",
        "hearth.cli.resources:IdFlags",
        "Cancel a trainer job, or scale a deployment to zero.",
    ),
    "start": VerbEntry(
        "hearth.cli.resources:start",
        "hearth.cli.resources:IdFlags",
        "Start a stopped trainer job or deployment again.",
    ),
    "plan": VerbEntry(
        "hearth.cli.plan:plan",
        "hearth.cli.plan:PlanFlags",
        "Say whether a model fits some GPUs, and which shape to choose.",
    ),
    "doctor": VerbEntry(
        "hearth.cli.doctor:doctor",
        "hearth.cli.doctor:DoctorFlags",
        "Check this machine: versions, compiler, GPU, memory, ports; train a little.",
    ),
    "completion": VerbEntry(
        "hearth.cli.completion:completion",
        "hearth.cli.completion:CompletionFlags",
        "Print what completes verbs and flags: source <(hearth completion bash).",
    ),
    "conformance": VerbEntry(
        "hearth.cli.conformance:conformance",
        "hearth.cli.conformance:ConformanceFlags",
        "Say how far a server keeps Tinker's API, with a score.",
    ),
}
