"""What a deployment's own process runs: its engine and its app.

Whoever forks such processes imports this module beforehand, and with it all that takes long.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

# Imported where they are used as well, at the price of seconds per process.
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - see above

from hearth.errors import ConfigError
from hearth.inference.engine.engine import LONGEST_DEFAULT, InferenceEngine
from hearth.inference.engine.options import EngineOptions
from hearth.inference.service import create_app
from hearth.inference.vllm.backend import VllmBackend
from hearth.inference.vllm.model import read_facts
from hearth.inference.vllm.options import VllmOptions, read_options
from hearth.inference.vllm.server import ServerPlan, write_plugin
from hearth.models.loading import best_device, load_model, load_tokenizer
from hearth.models.vocabulary import check_tokenizer
from hearth.settings import vllm_python
from hearth.sidecars import Sidecars
from hearth.sync.store import Buckets, buckets_of

OnPhase = Callable[[str], None]


def build(
    *,
    buckets: str | Buckets,
    name: str,
    base_model: str,
    source: str,
    bucket: str,
    state_dir: str | None,
    tokenizer: str | None,
    engine: str,
    replicas: int,
    engine_options: Mapping[str, Any],
    dtype: str,
    device: str | None,
    max_seq_len: int | None,
    max_batch_size: int,
    trust_remote_code: bool,
    sidecars: Sidecars,
    on_phase: OnPhase,
) -> tuple[Starlette, Callable[[], None]]:
    """The app of a deployment that serves snapshots of ``buckets``, and what closes it.

    ``on_phase`` is told what it does from now on. ``device`` None takes a GPU where there is one.

    Raises:
        ConfigError: the model cannot be loaded or served, the tokenizer is another model's, an
            engine option breaks its rule, or vLLM does not start.
    """
    if engine == "vllm":
        on_phase("starting vLLM")
        drawing = _vllm(
            name=base_model,
            source=source,
            tokenizer=tokenizer or source,
            dtype=dtype,
            device=device,
            replicas=replicas,
            options=read_options(engine_options),
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            trust_remote_code=trust_remote_code,
            sidecars=sidecars,
            state_dir=state_dir,
        )
    else:
        _check_embedded(replicas, engine_options)
        on_phase("loading model")
        loaded = load_model(
            source,
            name=base_model,
            dtype=dtype,
            device=device or best_device(),
            trust_remote_code=trust_remote_code,
        )
        drawing = InferenceEngine(
            loaded,
            tokenizer=_tokenizer(tokenizer or source, source, trust_remote_code),
            options=EngineOptions(max_seq_len=max_seq_len, max_rows=max_batch_size),
        )
    on_phase("idle")
    app = create_app(
        drawing,
        model_name=name,
        snapshots=buckets_of(buckets),
        default_bucket=bucket,
        state_dir=Path(state_dir) if state_dir else None,
        on_phase=on_phase,
        failed=drawing.failed if isinstance(drawing, VllmBackend) else None,
    )
    return app, drawing.close


def _vllm(
    *,
    name: str,
    source: str,
    tokenizer: str,
    dtype: str,
    device: str | None,
    replicas: int,
    options: VllmOptions,
    max_seq_len: int | None,
    max_batch_size: int,
    trust_remote_code: bool,
    sidecars: Sidecars,
    state_dir: str | None,
) -> VllmBackend:
    facts = read_facts(source, name=name, trust_remote_code=trust_remote_code)
    spoken = _tokenizer(tokenizer, source, trust_remote_code)
    folder = _vllm_folder(state_dir)
    plan = ServerPlan(
        python=vllm_python(),
        source=source,
        tokenizer=tokenizer,
        plugin_dir=write_plugin(folder / "plugin"),
        dtype=dtype,
        max_seq_len=max_seq_len or min(facts.max_position, LONGEST_DEFAULT),
        max_batch_size=max_batch_size,
        is_cpu=(device or best_device()).startswith("cpu"),
        trust_remote_code=trust_remote_code,
        options=options,
    )
    return VllmBackend(
        plan, facts, replicas=replicas, sidecars=sidecars, folder=folder, tokenizer=spoken
    )


def _tokenizer(name: str, source: str, trust_remote_code: bool) -> Any:
    spoken = load_tokenizer(name, trust_remote_code=trust_remote_code)
    check_tokenizer(spoken, name, source, trust_remote_code=trust_remote_code)
    return spoken


def _vllm_folder(state_dir: str | None) -> Path:
    """An empty folder for what vLLM's servers read."""
    if state_dir is None:
        return Path(tempfile.mkdtemp(prefix="hearth-vllm-"))
    folder = Path(state_dir) / "vllm"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _check_embedded(replicas: int, engine_options: Mapping[str, Any]) -> None:
    if replicas > 1:
        raise ConfigError(
            f"replicas must be 1 with engine 'embedded', got {replicas}: its weights are this "
            "worker's own; use engine 'vllm', or one deployment each"
        )
    if engine_options:
        raise ConfigError(
            f"engine_options must be absent with engine 'embedded', got {sorted(engine_options)}"
        )
