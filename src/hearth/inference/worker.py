"""What a deployment's own process runs: its engine and its app.

Whoever forks such processes imports this module beforehand, and with it all that takes long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

# Imported where they are used as well, at the price of seconds per process.
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - see above

from hearth.companions import Companions
from hearth.errors import ConfigError
from hearth.inference.engine.engine import InferenceEngine
from hearth.inference.engine.options import EngineOptions
from hearth.inference.service import create_app
from hearth.models.loading import best_device, load_model, load_tokenizer
from hearth.models.vocabulary import check_tokenizer
from hearth.sync.store import Buckets, buckets_of

OnPhase = Callable[[str], None]


def build(
    *, buckets: str | Buckets, name: str, base_model: str, source: str, bucket: str,
    state_dir: str | None, tokenizer: str | None, engine: str, replicas: int,
    engine_options: Mapping[str, Any], dtype: str, device: str | None, max_seq_len: int | None,
    max_batch_size: int, trust_remote_code: bool, companions: Companions, on_phase: OnPhase,
) -> tuple[Starlette, Callable[[], None]]:  # fmt: skip
    """The app of a deployment that serves snapshots of ``buckets``, and what closes it.

    ``on_phase`` is told what it does from now on. ``device`` None takes a GPU where there is one.

    Raises:
        ConfigError: the model cannot be loaded or served, or the tokenizer is another model's.
    """
    if engine != "embedded" or replicas > 1:
        raise ConfigError(f"engine must be 'embedded' with one replica, got {engine!r}, {replicas}")
    on_phase("loading model")
    loaded = load_model(
        source, name=base_model, dtype=dtype, device=device or best_device(),
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    spoken = load_tokenizer(tokenizer or source, trust_remote_code=trust_remote_code)
    check_tokenizer(spoken, tokenizer or source, source, trust_remote_code=trust_remote_code)
    drawing = InferenceEngine(
        loaded,
        tokenizer=spoken,
        options=EngineOptions(max_seq_len=max_seq_len, max_rows=max_batch_size),
    )
    on_phase("idle")
    app = create_app(
        drawing, model_name=name, snapshots=buckets_of(buckets),
        default_bucket=bucket, state_dir=Path(state_dir) if state_dir else None, on_phase=on_phase,
    )  # fmt: skip
    return app, drawing.close
