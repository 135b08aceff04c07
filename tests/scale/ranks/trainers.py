"""Trainers as a client meets them, in processes of their own, and what they are compared with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from numpy.typing import NDArray
from tests.integration.launch.conftest import RecordingWatcher
from tests.unit.trainer.conftest import make_datum
from torch import Tensor

from hearth.launch.processes import ProcessLauncher
from hearth.launch.records import last_lines
from hearth.launch.spec import TrainerSpec
from hearth.sync.chain import resolve
from hearth.sync.manifest import read_manifest
from hearth.sync.store import FolderBuckets, FolderSnapshotStore
from hearth.trainer.checkpoint import DATA
from hearth.trainer.dcp import load_tensors
from hearth.trainer.engine import TrainerEngine
from hearth.wire.tensors import TensorRecord
from hearth.wire.tinker import AdamParams, DatumRecord

START_S = 120.0
VOCABULARY = 67
"""A prime, as are most sizes of the tests' models: no number of ranks divides them."""


class RefusedError(Exception):
    """What a future says of an operation that failed."""


class RankTrainer:
    """A trainer of several ranks, called as a ``TrainerEngine`` is."""

    def __init__(self, launcher: ProcessLauncher, data_dir: Path, spec: TrainerSpec) -> None:
        self.watcher = RecordingWatcher()
        self.folder = data_dir / "workers" / spec.worker_id
        self._buckets, self._bucket = data_dir / "buckets", spec.bucket
        self._seq: dict[str, int] = {}
        self._models = 0
        self.worker = launcher.start(spec, self.watcher)
        self.watcher.wait_ready(START_S)
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=self.worker.endpoint.socket),
            base_url="http://worker",
            timeout=120,
        )

    @property
    def snapshots(self) -> FolderSnapshotStore:
        """Those that it has published."""
        return FolderBuckets(self._buckets).bucket(self._bucket)

    def log(self, rank: int) -> Sequence[str]:
        return last_lines(self.folder / "sidecars" / f"rank-{rank}" / "log")

    def pid(self, rank: int) -> int:
        """The process of a rank other than 0."""
        log = (self.folder / "sidecars" / f"rank-{rank}" / "log").read_text(encoding="utf-8")
        found = re.search(r": process (\d+),", log)
        assert found is not None, log
        return int(found[1])

    def ask(self, operation: str, **body: Any) -> dict[str, Any]:
        """The result of an operation.

        Raises:
            RefusedError: it failed.
        """
        future = self.begin(operation, **body)
        while True:
            answer = self._http.post("/api/v1/retrieve_future", json=future).json()
            if answer.get("type") != "try_again":
                break
        if "error" in answer:
            raise RefusedError(answer["error"])
        return answer

    def begin(self, operation: str, **body: Any) -> dict[str, Any]:
        """Send an operation without waiting for its result."""
        if "model_id" in body and operation != "unload_model":
            self._seq[body["model_id"]] = body["seq_id"] = self._seq.get(body["model_id"], 0) + 1
        answer = self._http.post(f"/api/v1/{operation}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def create_model(self, *, lora: dict[str, Any] | None = None, is_frozen: bool = False) -> str:
        body = {} if lora is None else {"lora_config": lora}
        self._models += 1
        return self.ask(
            "create_model",
            session_id="s",
            model_seq_id=self._models,
            base_model="tiny",
            base_only=is_frozen,
            owner=str(self._models),
            **body,
        )["model_id"]

    def forward(
        self,
        model_id: str,
        data: Sequence[DatumRecord],
        loss_fn: str = "cross_entropy",
        config: dict[str, Any] | None = None,
        *,
        operation: str = "forward",
    ) -> tuple[list[NDArray[Any]], dict[str, float]]:
        given = {
            "data": [datum.as_dict() for datum in data],
            "loss_fn": loss_fn,
            "loss_fn_config": config,
        }
        answer = self.ask(operation, model_id=model_id, **{f"{operation}_input": given})
        rows = [TensorRecord.from_dict(output["logprobs"]) for output in answer["loss_fn_outputs"]]
        return [row.to_numpy() for row in rows], answer["metrics"]

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs, operation="forward_backward")

    def optim_step(self, model_id: str, adam: AdamParams, normalization: str) -> dict[str, float]:
        return self.ask(
            "optim_step",
            model_id=model_id,
            adam_params=adam.as_dict(),
            grad_accumulation_normalization=normalization,
        )["metrics"]

    def save_state(self, model_id: str, name: str) -> None:
        self.ask("save_weights", model_id=model_id, path=name, overwrite=True)

    def load_state(self, model_id: str, name: str, *, with_optimizer: bool = True) -> None:
        self.ask("load_weights", model_id=model_id, path=name, optimizer=with_optimizer)

    def published(self, model_id: str, identity: str, kind: str = "base") -> dict[str, Tensor]:
        """The weights of a snapshot that it publishes."""
        self.ask("save_weights_for_sampler", model_id=model_id, path=identity, checkpoint_type=kind)
        return dict(resolve(self.snapshots, identity).tensors)

    def unload(self, model_id: str) -> None:
        self.ask("unload_model", model_id=model_id)

    def close(self) -> None:
        self._http.close()
        self.worker.stop()


class OneProcess:
    """A ``TrainerEngine`` in the test's process, called in the same way."""

    def __init__(self, engine: TrainerEngine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.engine.forward(*args, **kwargs)
        return result.logprobs, result.metrics

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.engine.forward_backward(*args, **kwargs)
        return result.logprobs, result.metrics

    def save_state(self, model_id: str, name: str) -> None:
        self.engine.save_state(model_id, name, overwrite=True)

    def load_state(self, model_id: str, name: str, *, with_optimizer: bool = True) -> None:
        self.engine.load_state(model_id, name, with_optimizer=with_optimizer)


def checkpoint_tensors(root: Path, name: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as one process reads them."""
    return load_tensors(root / name / DATA, read_manifest(root / name)["files"])


def gradient(trainer: Any, model_id: str, root: Path) -> dict[str, Tensor]:
    """The accumulated gradient by parameter name; it is gone afterwards, the weights are not.

    With ``beta1`` 0 the first moment is the gradient, and a checkpoint shows it.
    """
    trainer.optim_step(model_id, AdamParams(learning_rate=0.0, beta1=0.0), "none")
    trainer.save_state(model_id, "gradient")
    prefix = "optimizer/exp_avg/"
    found = checkpoint_tensors(root, "gradient").items()
    return {name.removeprefix(prefix): tensor for name, tensor in found if name.startswith(prefix)}


def random_data(lengths: Sequence[int], seed: int = 0, vocabulary: int = VOCABULARY) -> Any:
    """Datums of these lengths with random weights, the first half of each zero."""
    rng = np.random.default_rng(seed)
    data: list[DatumRecord] = []
    for length in lengths:
        weights = rng.normal(size=length) * (np.arange(length) >= length // 2)
        data.append(make_datum(rng.integers(0, vocabulary, length + 1).tolist(), weights=weights))
    return data


def assert_close(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """Equal names, and values that differ by ``tolerance`` of the largest of each tensor."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        limit = tolerance * max(1.0, float(tensor.abs().max()))
        difference = float((found[name].float() - tensor.float()).abs().max())
        assert difference <= limit, f"{name}: {difference:.2g}"


def write_model(folder: Path, *, is_tied: bool = True, layers: int = 2) -> Path:
    """A Qwen3 of a few layers whose sizes no number of ranks divides; the same every time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=36,
        intermediate_size=53,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=6,
        max_position_embeddings=256,
        tie_word_embeddings=is_tied,
        eos_token_id=3,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.2,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder
