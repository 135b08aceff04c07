"""Runs the recipes of the Fireworks cookbook, unmodified, against a platform of this checkout.

    python -m tests.clients.fireworks_cookbook --cookbook CLONE --python ENVIRONMENT/bin/python

CLONE is a clone of the repository fw-ai/cookbook; ENVIRONMENT has its package installed. Each
recipe runs at rank 0 and at rank 8. The table says what was checked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tests.clients.model import run_program

from hearth.local import tinker_server
from hearth.settings import CATALOG_VARIABLE
from training.quickstart import MODEL

_NAME = "accounts/fireworks/models/tiny"
_REPOSITORY = Path(__file__).parents[2]
Metrics = list[dict[str, Any]]


def _is_ln_2(metrics: Metrics) -> str:
    loss = metrics[0]["dpo_loss"]
    assert abs(loss - math.log(2)) < 1e-6, loss
    return f"first loss {loss:.6f} = ln 2"


def _starts_at_reference(metrics: Metrics) -> str:
    divergences = [line["ref_kl"] for line in metrics]
    assert divergences[0] < 1e-6 < divergences[-1], divergences
    return f"KL to the reference {divergences[0]:.0e} to {divergences[-1]:.0e}"


def _has_finite_loss(metrics: Metrics) -> str:
    losses = [
        value
        for line in metrics
        for key, value in line.items()
        if "loss" in key and isinstance(value, float)
    ]
    assert losses, f"no loss in {metrics}"
    assert all(math.isfinite(loss) for loss in losses), losses
    return f"first loss {losses[0]:.3f}"


def _starts_at_teacher(metrics: Metrics) -> str:
    divergence = metrics[0]["opd_sampled_reverse_kl"]
    assert abs(divergence) < 1e-5, divergence
    return f"first reverse KL to the teacher {divergence:.0e}"


def _has_steps(metrics: Metrics) -> str:
    del metrics
    return "ended"


RECIPES: dict[str, Callable[[Metrics], str]] = {
    "sft_loop": _has_finite_loss,
    "dpo_loop": _is_ln_2,
    "orpo_loop": _has_finite_loss,
    "distillation_loop, sampled_reverse_kl": _starts_at_teacher,
    "distillation_loop, topk_forward_kl": _has_finite_loss,
    "rl_loop": _starts_at_reference,
    "async_rl_loop": _has_steps,
}
"""And their checks. igpo_loop of 2026-08-19 calls a function of its own with too few arguments."""


@dataclass(frozen=True)
class Environment:
    """Where the cookbook is, and where its recipes run."""

    python: Path
    cookbook: Path
    work: Path
    url: str


def run(recipe: str, rank: int, environment: Environment) -> tuple[bool, str]:
    """Whether it ran to its end and promoted trained weights, and what it showed."""
    work = environment.work
    name = f"{recipe}-{rank}".replace(", ", "-").replace("_", "-")
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(environment.cookbook), str(_REPOSITORY)]),
        "FIREWORKS_BASE_URL": environment.url,
        "FIREWORKS_API_KEY": "fw_any",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
    }
    arguments = [recipe, str(rank), _NAME, str(MODEL), str(work / name)]
    log = work / f"{name}.log"
    argv = [environment.python, "-m", "tests.clients.fireworks_recipe", *arguments]
    code = run_program(argv, work, variables, log)
    lines = log.read_text(errors="replace").splitlines()
    if code != 0:
        return False, f"exit {code}: {lines[-1][:200]}"
    metrics = [json.loads(line[line.index(_METRICS) :]) for line in lines if _METRICS in line]
    try:
        return True, f"{RECIPES[recipe](metrics)}; {_compare_promoted(work, name, rank)}"
    except (AssertionError, KeyError, IndexError, OSError) as error:
        return False, f"{type(error).__name__}: {str(error)[:300]}"


_METRICS = '{"type": "metrics"'


def _compare_promoted(work: Path, name: str, rank: int) -> str:
    """How many tensors of the promoted model were trained; all must be."""
    folder = work / "platform" / "models" / name
    if rank:
        adapter = load_file(folder / "adapter_model.safetensors")
        trained = [bool(tensor.any()) for key, tensor in adapter.items() if "lora_B" in key]
    else:
        base = load_file(MODEL / "model.safetensors")
        model = load_file(folder / "model.safetensors")
        assert model.keys() == base.keys(), model.keys() ^ base.keys()
        trained = [not tensor.equal(base[key]) for key, tensor in model.items()]
    assert all(trained), f"{trained.count(False)} of {len(trained)} tensors are untrained"
    return f"all {len(trained)} tensors of the promoted model are trained"


def main() -> int:
    """Run the recipes, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cookbook", type=Path, required=True)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/fireworks-cookbook"))
    parser.add_argument("--only", default="", help="recipes whose name has this text")
    options = parser.parse_args()
    work = options.work.resolve() / time.strftime("%H%M%S")
    work.mkdir(parents=True)
    catalog = work / "catalog.toml"
    catalog.write_text(f"[models.{json.dumps(_NAME)}]\nsource = {json.dumps(str(MODEL))}\n")
    os.environ[CATALOG_VARIABLE] = str(catalog)
    is_right = True
    with tinker_server(work / "platform") as url:
        environment = Environment(options.python.absolute(), options.cookbook.resolve(), work, url)
        for recipe in RECIPES:
            for rank in (0, 8) if options.only in recipe else ():
                begin_s = time.monotonic()
                runs, says = run(recipe, rank, environment)
                is_right &= runs
                seconds, sign = time.monotonic() - begin_s, "runs" if runs else "FAILS"
                print(f"| {recipe} | {rank} | {sign} | {seconds:.0f} s | {says} |", flush=True)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
