"""What a deployment's own process runs: its engine and its app.

A forkserver imports this module before it forks such processes, and with it all slow libraries.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from starlette.applications import Starlette

# Imported here so that the forkserver has them; each process would spend seconds on it.
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - see above

from hearth.errors import ConfigError
from hearth.inference.engine.engine import LONGEST_DEFAULT, InferenceEngine
from hearth.inference.engine.options import EngineOptions
from hearth.inference.service import create_app
from hearth.inference.vllm.backend import VllmBackend
from hearth.inference.vllm.model import read_facts
from hearth.inference.vllm.options import read_options
from hearth.inference.vllm.server import ServerPlan, write_plugin
from hearth.models.loading import best_device, choose_dtype, load_model, load_tokenizer
from hearth.models.vocabulary import check_tokenizer
from hearth.settings import vllm_python
from hearth.sidecars import Sidecars
from hearth.sync.objects import open_buckets
from hearth.sync.store import Buckets, SnapshotStore

logger = logging.getLogger(__name__)

OnPhase = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class DeploymentOptions:
    """What a launcher passes: the fields of its ``DeploymentSpec``, and where snapshots are."""

    buckets: str | Buckets[SnapshotStore]
    """Their folder, or the buckets themselves where they are in this process."""
    name: str
    base_model: str
    source: str
    bucket: str
    state_dir: str | None
    tokenizer: str | None
    engine: str
    replicas: int
    engine_options: Mapping[str, Any]
    dtype: str
    device: str
    max_seq_len: int | None
    max_batch_size: int
    max_adapters: int
    trust_remote_code: bool

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The options of a launcher's values.

        ``device`` None takes a GPU where there is one, ``dtype`` None the device's fast one.
        """
        device = values["device"] or best_device()
        return cls(**{**values, "device": device, "dtype": choose_dtype(values["dtype"], device)})

    def load_tokenizer(self) -> Any:
        """The tokenizer, checked against the model's vocabulary."""
        name, trust = self.tokenizer or self.source, self.trust_remote_code
        tokenizer = load_tokenizer(name, trust_remote_code=trust)
        check_tokenizer(tokenizer, name, self.source, trust_remote_code=trust)
        return tokenizer


def build(
    *, sidecars: Sidecars, on_phase: OnPhase, **values: Any
) -> tuple[Starlette, Callable[[], None]]:
    """The app of a deployment, and what closes it; ``values`` are of ``DeploymentOptions``.

    ``on_phase`` is called with the name of each phase that begins.

    Raises:
        ConfigError: the model cannot be loaded or served, the tokenizer is another model's, an
            engine option breaks its rule, or vLLM does not start.
    """
    options = DeploymentOptions.from_values(values)
    logger.info("the deployment computes in %s on %s", options.dtype, options.device)
    if options.engine == "vllm":
        on_phase("starting vLLM")
        backend = _start_vllm(options, sidecars)
    else:
        _check_embedded(options)
        on_phase("loading model")
        backend = _start_embedded(options)
    on_phase("idle")
    app = create_app(
        backend,
        model_name=options.name,
        snapshots=open_buckets(options.buckets),
        default_bucket=options.bucket,
        state_dir=Path(options.state_dir) if options.state_dir else None,
        on_phase=on_phase,
    )
    return app, backend.close


def _start_embedded(options: DeploymentOptions) -> InferenceEngine:
    loaded = load_model(
        options.source,
        name=options.base_model,
        dtype=options.dtype,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        # A trainer beside it in this process has the same weights.
        share=not isinstance(options.buckets, str),
    )
    return InferenceEngine(
        loaded,
        tokenizer=options.load_tokenizer(),
        options=EngineOptions(
            max_seq_len=options.max_seq_len,
            max_slots=options.max_batch_size,
            max_adapters=options.max_adapters,
        ),
    )


def _start_vllm(options: DeploymentOptions, sidecars: Sidecars) -> VllmBackend:
    vllm_options, trust = read_options(options.engine_options), options.trust_remote_code
    facts = read_facts(options.source, name=options.base_model, trust_remote_code=trust)
    facts.check_options(vllm_options)
    tokenizer = options.load_tokenizer()
    folder = _make_vllm_folder(options.state_dir)
    plan = ServerPlan(
        python=vllm_python(),
        source=options.source,
        tokenizer=options.tokenizer or options.source,
        plugin_dir=write_plugin(folder / "plugin"),
        dtype=options.dtype,
        max_seq_len=options.max_seq_len or min(facts.max_position, LONGEST_DEFAULT),
        max_batch_size=options.max_batch_size,
        is_cpu=options.device.startswith("cpu"),
        trust_remote_code=trust,
        options=vllm_options,
    )
    return VllmBackend(
        plan,
        facts,
        replicas=options.replicas,
        sidecars=sidecars,
        folder=folder,
        tokenizer=tokenizer,
    )


def _make_vllm_folder(state_dir: str | None) -> Path:
    """An empty folder for what vLLM's servers read."""
    if state_dir is None:
        return Path(tempfile.mkdtemp(prefix="hearth-vllm-"))
    folder = Path(state_dir) / "vllm"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _check_embedded(options: DeploymentOptions) -> None:
    if options.replicas > 1:
        raise ConfigError(
            f"replicas must be 1 with engine 'embedded', got {options.replicas}: its weights are "
            "this worker's own; use engine 'vllm', or one deployment each"
        )
    if options.engine_options:
        raise ConfigError(
            "engine_options must be absent with engine 'embedded', got "
            f"{sorted(options.engine_options)}"
        )
