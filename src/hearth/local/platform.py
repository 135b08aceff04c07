"""Trainers and deployments as threads of this process, reached through memory.

Each has its engine, its own thread and its own ASGI app, the very ones that a served platform
runs. What they exchange (snapshots) lives in one in-memory store.
"""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import torch

from hearth.errors import ConfigError, NotFoundError
from hearth.inference.engine.engine import EngineOptions, InferenceEngine
from hearth.inference.service import create_app as deployment_app
from hearth.local.gateway import TRAINER_PREFIX, Gateway
from hearth.local.registry import resolve_model
from hearth.models.loading import load_model, load_tokenizer
from hearth.sdk.transport import mount, unmount
from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine, TrainerOptions
from hearth.trainer.service import create_app as trainer_app

logger = logging.getLogger(__name__)

ACCOUNT = "me"
_numbers = itertools.count(1)


class EmbeddedPlatform:
    """One platform inside this process, at a base URL of its own until ``close``."""

    def __init__(self, *, work_dir: Path) -> None:
        self.base_url = f"http://embedded-{next(_numbers)}.hearth.internal"
        self._work_dir = work_dir
        self._snapshots = MemorySnapshotStore()
        self._trainers: dict[str, TrainerEngine] = {}
        self._deployments: dict[str, InferenceEngine] = {}
        self._gateway = Gateway()
        mount(self.base_url, self._gateway)
        logger.debug("embedded platform at %s", self.base_url)

    def __enter__(self) -> EmbeddedPlatform:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def create_trainer_job(
        self, base_model: str, *, job_id: str, max_seq_len: int, dtype: str = "float32",
        device: str | None = None, micro_batch_tokens: int = 16384, forward_only: bool = False,
    ) -> str:  # fmt: skip
        """Start a trainer of ``base_model``; returns its job id once it answers.

        Raises:
            ConfigError: the model is unknown or cannot be loaded, or the id is taken.
        """
        _require_new("job_id", job_id, self._trainers)
        options = TrainerOptions(
            dtype=dtype, device=device or best_device(), max_seq_len=max_seq_len,
            micro_batch_tokens=micro_batch_tokens, forward_only=forward_only,
        )  # fmt: skip
        engine = TrainerEngine(
            resolve_model(base_model), name=base_model, snapshots=self._snapshots,
            checkpoint_dir=self._work_dir / "checkpoints" / job_id, options=options,
        )  # fmt: skip
        self._trainers[job_id] = engine
        self._gateway.trainers[self._trainer_path(job_id)] = trainer_app(engine)
        return job_id

    def create_deployment(
        self, deployment_id: str, base_model: str, *, max_seq_len: int,
        tokenizer: str | None = None, dtype: str = "float32", device: str | None = None,
        max_batch_size: int = 64,
    ) -> str:  # fmt: skip
        """Start a deployment of ``base_model``; returns its model name once it answers.

        ``tokenizer`` (default: the model's own) serves texts and stop strings.

        Raises:
            ConfigError: the model is unknown or cannot be loaded or served, or the id is taken.
        """
        name = f"accounts/{ACCOUNT}/deployments/{deployment_id}"
        _require_new("deployment_id", name, self._deployments)
        source = resolve_model(base_model)
        engine = InferenceEngine(
            load_model(source, name=base_model, dtype=dtype, device=device or best_device()),
            tokenizer=load_tokenizer(tokenizer or source),
            options=EngineOptions(max_seq_len=max_seq_len, max_rows=max_batch_size),
        )
        self._deployments[name] = engine
        self._gateway.deployments[name] = deployment_app(
            engine, model_name=name, snapshots=self._snapshots
        )
        return name

    def trainer_url(self, job_id: str) -> str:
        """Base URL of one trainer."""
        return f"{self.base_url}{self._trainer_path(job_id)}"

    def export_model(self, job_id: str, model_id: str, folder: Path) -> None:
        """Write a trainer's current weights as a Hugging Face folder; LoRA is merged in.

        Raises:
            NotFoundError: there is no such trainer.
        """
        if job_id not in self._trainers:
            raise NotFoundError(
                f"trainer job must be one of {sorted(self._trainers)}, got {job_id!r}"
            )
        self._trainers[job_id].export(model_id, folder)

    def close(self) -> None:
        """Stop every engine; later requests are ``ClosedError``."""
        unmount(self.base_url)
        for deployment in reversed(self._deployments.values()):
            deployment.close()
        for trainer in reversed(self._trainers.values()):
            trainer.close()

    @staticmethod
    def _trainer_path(job_id: str) -> str:
        return f"{TRAINER_PREFIX}/{ACCOUNT}/{job_id}"


def best_device() -> str:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _require_new(field: str, name: str, known: dict[str, Any]) -> None:
    if name in known:
        raise ConfigError(f"{field} must be new, got {name!r}: it is running")
