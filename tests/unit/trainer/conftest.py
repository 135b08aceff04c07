"""Tiny random models on disk, engines on them, and random datums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.threads import one_thread as one_thread
from tests.unit.trainer.decoders import load_trained, make_folders

from hearth.models.loading import LoadedModel
from hearth.models.lora import LoraOptions
from hearth.sync.store import MemorySnapshotStore, SnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumRecord

VOCAB_SIZE = 96


def _save(folder: Path, kind: str) -> Path:
    import transformers

    torch.manual_seed(0)
    shared = {"vocab_size": VOCAB_SIZE, "bos_token_id": None, "eos_token_id": 3, "pad_token_id": 0}
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    families: dict[str, tuple[str, dict[str, Any]]] = {
        "qwen": ("Qwen3Config", shape),
        "gemma": ("Gemma2Config", shape | {"final_logit_softcapping": 2.0}),
        "granite": ("GraniteConfig", shape | {"logits_scaling": 5.0}),
        "cohere": ("CohereConfig", shape | {"logit_scale": 0.3}),
        "phi": ("PhiConfig", shape | {"num_key_value_heads": 4, "tie_word_embeddings": False}),
        "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 100}),
    }
    name, options = families[kind]
    config = getattr(transformers, name)(**shared, **options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    # As initialized the logits are almost flat, and a wrong one would pass for a right one.
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(8)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny model."""
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            made[kind] = _save(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return folder


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a random plain decoder, or of another one, by its kind."""
    return make_folders(tmp_path_factory)


@pytest.fixture
def read(folder_of: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    """A model of a kind, with a trained adapter where options for one are given."""
    return lambda kind, *options, **named: load_trained(folder_of(kind), *options, **named)


@pytest.fixture(scope="session")
def qwen_folder(model_of: Callable[[str], Path]) -> Path:
    return model_of("qwen")


@pytest.fixture
def make_engine(qwen_folder: Path, tmp_path: Path) -> Iterator[Callable[..., TrainerEngine]]:
    """An engine on the tiny Qwen3, or on ``source``; other keyword arguments are its options."""
    made: list[TrainerEngine] = []

    def make(
        source: Path | None = None,
        *,
        snapshots: SnapshotStore | None = None,
        folder: str = "checkpoints",
        **options: Any,
    ) -> TrainerEngine:
        engine = TrainerEngine(
            source or qwen_folder,
            name="tiny",
            snapshots=snapshots or MemorySnapshotStore(),
            checkpoint_dir=tmp_path / folder,
            options=TrainerOptions(**options),
        )
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


@dataclass(frozen=True)
class Policy:
    """A model on an engine of its own; calls go to the engine, with the model's id."""

    engine: TrainerEngine
    model_id: str
    checkpoints: Path

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self.engine, name), self.model_id)

    def read_gradient(self) -> dict[str, torch.Tensor]:
        """The accumulated gradient by parameter name; it is gone afterwards, the weights are not.

        With ``beta1`` 0 the first moment is the gradient, and a checkpoint shows it.
        """
        self.optim_step(AdamParams(learning_rate=0.0, beta1=0.0))
        self.save_state("gradient", overwrite=True)
        prefix = "optimizer/exp_avg/"
        return {
            name.removeprefix(prefix): value
            for file in (self.checkpoints / "gradient" / "data").glob("*.safetensors")
            for name, value in load_file(file).items()
            if name.startswith(prefix)
        }


MakePolicy = Callable[..., Policy]


@pytest.fixture
def engine(make_engine: Callable[..., TrainerEngine]) -> TrainerEngine:
    return make_engine()


@pytest.fixture
def make_policy(make_engine: Callable[..., TrainerEngine], tmp_path: Path) -> MakePolicy:
    """A policy with an adapter, or all of its parameters; the rest is that of ``make_engine``."""

    def make(lora: LoraOptions | None = None, **options: Any) -> Policy:
        engine = make_engine(**options)
        checkpoints = tmp_path / options.get("folder", "checkpoints")
        return Policy(engine, engine.create_model(lora, owner="test"), checkpoints)

    return make


@pytest.fixture
def policy(make_policy: MakePolicy) -> Policy:
    return make_policy()


def make_datum(tokens: Sequence[int], targets: Any = None, **inputs: Any) -> DatumRecord:
    """A datum of given token ids; keyword arguments are its loss inputs."""
    targets = tokens[1:] if targets is None else targets
    given = {"target_tokens": encode(np.asarray(targets), "int64")}
    given |= {name: encode(np.asarray(values), "float32") for name, values in inputs.items()}
    return DatumRecord.model_validate(
        {
            "model_input": {"chunks": [{"tokens": list(tokens[:-1])}]},
            "loss_fn_inputs": {name: tensor.as_dict() for name, tensor in given.items()},
        }
    )


@pytest.fixture(scope="session")
def datum() -> Callable[..., DatumRecord]:
    return make_datum


@pytest.fixture(scope="session")
def random_data(datum: Callable[..., DatumRecord]) -> Callable[..., list[DatumRecord]]:
    """Datums of various lengths with random weights, the first half of each zero."""

    def make(count: int = 12, seed: int = 0, longest: int = 70) -> list[DatumRecord]:
        rng = np.random.default_rng(seed)
        data: list[DatumRecord] = []
        for _ in range(count):
            length = int(rng.integers(2, longest))
            tokens = rng.integers(0, VOCAB_SIZE, length + 1).tolist()
            weights = rng.normal(size=length) * (np.arange(length) >= length // 2)
            data.append(datum(tokens, weights=weights))
        return data

    return make


@pytest.fixture
def data(random_data: Callable[..., list[DatumRecord]]) -> list[DatumRecord]:
    return random_data()
