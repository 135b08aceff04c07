"""Backends over scripted servers: real processes, real HTTP, made-up tokens."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from hearth.inference.vllm.backend import VllmBackend
from hearth.inference.vllm.model import VllmModelFacts
from hearth.inference.vllm.options import VllmOptions
from hearth.inference.vllm.server import ServerPlan
from hearth.launch.sidecars import LocalSidecars
from hearth.sync.store import Snapshot

FACTS = VllmModelFacts(
    name="tiny",
    source="tiny",
    shapes={"w": (4,)},
    eos_token_ids=(49,),
    vocab_size=50,
    max_position=512,
    has_experts=False,
)


def install(folder: Path) -> Path:
    """Make ``folder`` a place where ``python -m vllm...`` finds a scripted server."""
    package = folder / "vllm" / "entrypoints" / "launchers" / "api_server"
    package.mkdir(parents=True)
    for parent in list(package.parents)[:3]:
        (parent / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("scripted_server.py"), package / "entry.py")
    (folder / "orders").mkdir()
    return folder


def python_with(folder: Path) -> Path:
    """An interpreter that has the scripted server of a folder."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


class Scripted:
    """A backend, and what its servers are ordered to do."""

    def __init__(self, folder: Path, replicas: int, options: dict[str, Any]) -> None:
        self.folder = folder
        self.orders = install(folder / "servers") / "orders"
        self.sidecars = LocalSidecars(folder / "sidecars")
        self.plan = ServerPlan(
            python=sys.executable,
            source="tiny",
            tokenizer="tiny",
            plugin_dir=folder / "servers",
            dtype="float32",
            max_seq_len=128,
            max_batch_size=4,
            is_cpu=True,
            options=VllmOptions(**{"start_timeout_s": 20.0, **options}),
        )
        self._replicas = replicas
        self.backend: Any = None

    def start(self) -> VllmBackend:
        self.backend = VllmBackend(
            self.plan,
            FACTS,
            replicas=self._replicas,
            sidecars=self.sidecars,
            folder=self.folder / "state",
        )
        return self.backend

    def order(self, name: str) -> None:
        (self.orders / name).touch()

    def withdraw(self, name: str) -> None:
        (self.orders / name).unlink()

    def pids(self) -> list[int]:
        return [int(line) for line in (self.orders.parent / "pids").read_text().split()]

    def calls(self, pid: int) -> list[str]:
        file = self.orders.parent / f"calls-{pid}"
        return file.read_text().splitlines() if file.exists() else []

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()
        self.sidecars.close()


def snapshot(identity: str, value: float = 1.0, **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {"kind": "base", "tensors": {"w": torch.full((4,), value)}, **changes}
    return Snapshot(identity, base_model="tiny", **fields)
