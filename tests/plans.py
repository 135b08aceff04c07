"""What `hearth plan` prints, executed: its catalog is served, and its command trains on it."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.runs import read_metrics
from tests.integration.served import Served, share_recipes

from training.quickstart import MODEL, TRAIN_ROWS

_REWARD = """
def spread(text, row):
    return sum((place + 1) * ord(letter) for place, letter in enumerate(text)) % 1009 / 1009
"""
_SHORT = {
    "dataset": TRAIN_ROWS,
    "reward": "reward:spread",
    "max-rows": 2,
    "completions-per-prompt": 4,
    "max-completion-tokens": 8,
    "log-path": "run",
}
"""Flags that make a run one of two steps; they say nothing of trainers and deployments."""


@dataclass
class Printed:
    """A plan that fits: the catalog file and the lines for a shell, in a folder of their own."""

    folder: Path
    catalog: str
    lines: list[str]
    variables: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, folder: Path, *flags: str, config: Any = None) -> Printed:
        """The plan of the shipped model; or of a ``config``, in whose place that one then stands.

        The shipped model of a larger one's plan has the same branch, and trains on this machine.
        """
        model = folder / "model"
        if config is None:
            shutil.copytree(MODEL, model)
        else:
            config.save_pretrained(model)
        shown = _run(["plan", f"--model={model}", *flags], folder, {})
        shutil.copytree(MODEL, model, dirs_exist_ok=True)
        head, _, rest = shown.partition("# shapes.toml, a catalog file\n")
        assert "\nfits " in head, shown
        catalog, _, lines = rest.partition("# in a shell; more settings: hearth train rl --help\n")
        (folder / "reward.py").write_text(_REWARD, encoding="utf-8")
        return cls(folder, catalog, lines.splitlines())

    @property
    def shapes(self) -> list[dict[str, Any]]:
        """The shapes of the catalog, the policy's first."""
        return list(tomllib.loads(self.catalog)["shapes"].values())

    def shrink(self, **counts: int) -> None:
        """Have fewer processes than planned; a count that was not printed cannot be changed."""
        for name, count in counts.items():
            self.catalog, times = re.subn(rf"(?m)^{name} = \d+$", f"{name} = {count}", self.catalog)
            assert times, self.catalog

    def compute_in_float32(self) -> None:
        """As some processors do tens of times sooner; no process is another than planned."""
        self.catalog, times = re.subn('dtype = "bfloat16"', 'dtype = "float32"', self.catalog)
        assert times, self.catalog

    def train(self) -> list[dict[str, Any]]:
        """Do what the lines say; the records of the run's steps."""
        (self.folder / "shapes.toml").write_text(self.catalog, encoding="utf-8")
        with contextlib.ExitStack() as stack:
            for line in self.lines:
                words = shlex.split(line, comments=True)
                if words[0] == "export":
                    given = dict(word.split("=", 1) for word in words[1:])
                    self.variables = given | self.variables
                elif words[:2] == ["hearth", "serve"]:
                    platform = stack.enter_context(self._serve(words[2:]))
                    # Its port is free; that of the line may be taken on the tests' machine.
                    self.variables["HEARTH_URL"] = platform.url
                else:
                    assert words[:3] == ["hearth", "train", "rl"]
                    more = [f"--{name}={value}" for name, value in _SHORT.items()]
                    _run([*words[1:], *more], self.folder, self.variables)
        return read_metrics(self.folder / "run")

    def worker_logs(self, kind: str) -> str:
        """All that the served workers whose names begin with ``kind`` have logged."""
        logs = (self.folder / "data" / "workers").glob(f"{kind}*/log")
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    def sidecars(self, kind: str) -> set[str]:
        """The sidecars that they have started."""
        found = (self.folder / "data" / "workers").glob(f"{kind}*/sidecars/*")
        return {path.stem for path in found}

    @contextlib.contextmanager
    def _serve(self, flags: list[str]) -> Iterator[Served]:
        assert flags[::2] == ["--catalog", "--placement"]
        catalog, placement = flags[1::2]
        platform = Served(self.folder / "data", catalog=self.folder / catalog, placement=placement)
        try:
            yield platform
        finally:
            platform.stop()


def _run(arguments: list[str], folder: Path, variables: Mapping[str, str]) -> str:
    """What `hearth` prints with these arguments."""
    done = share_recipes().run("hearth", arguments, folder, COLUMNS="200", **variables)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
