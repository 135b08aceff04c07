"""What a trainer's own process runs: its engine and its app, and the export of a snapshot.

Whoever forks such processes imports this module beforehand, and with it all that takes long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from starlette.applications import Starlette

# Imported where they are used as well, at the price of seconds per process.
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - see above

from hearth.errors import ConfigError
from hearth.models.loading import best_device
from hearth.sidecars import Sidecars
from hearth.sync.chain import resolve
from hearth.sync.store import Buckets, buckets_of
from hearth.trainer.adapters import AdapterShelf
from hearth.trainer.engine import TrainerEngine, TrainerOptions
from hearth.trainer.export import export_snapshot
from hearth.trainer.ranks.engine import RankSettings
from hearth.trainer.ranks.start import start_ranks
from hearth.trainer.service import create_app

OnPhase = Callable[[str], None]


def build(
    *,
    buckets: str | Buckets,
    base_model: str,
    source: str,
    bucket: str,
    checkpoint_dir: str,
    forward_only: bool,
    ranks: int,
    rank_timeout_s: float,
    offload_optimizer: bool,
    dtype: str,
    device: str | None,
    max_seq_len: int | None,
    micro_batch_tokens: int,
    recompute_above: int | None,
    keep_checkpoints: int | None,
    keep_snapshots: int | None,
    models_dir: str | None,
    allow_folders: bool,
    trust_remote_code: bool,
    sidecars: Sidecars,
    on_phase: OnPhase,
) -> tuple[Starlette, Callable[[], None]]:
    """The app of a trainer that publishes to ``bucket``, and what closes it.

    ``buckets`` is their folder, or the buckets themselves where they are in this process.
    ``on_phase`` is told what it does from now on. ``device`` None takes a GPU where there is one.

    Raises:
        ConfigError: the model cannot be loaded, or an option breaks its rule.
    """
    if ranks > 1 and not isinstance(buckets, str):
        raise ConfigError(
            f"ranks must be 1 with the inline placement, got {ranks}: a process group does not "
            "belong into the user's process; use placement='process', or hearth serve"
        )
    if ranks == 1 and offload_optimizer:
        raise ConfigError(
            "offload_optimizer must be off with ranks=1, got True: only weights that ranks share "
            "can be kept in the host's memory"
        )
    on_phase("loading model")
    device = device or best_device()
    options = TrainerOptions(
        # Whole weights of a trainer of ranks are only ever in the host's memory.
        dtype=dtype,
        device=device if ranks == 1 else "cpu",
        max_seq_len=max_seq_len,
        micro_batch_tokens=micro_batch_tokens,
        recompute_above=recompute_above,
        forward_only=forward_only,
        keep_checkpoints=keep_checkpoints,
        trust_remote_code=trust_remote_code,
    )
    if ranks > 1:
        settings = RankSettings(
            source=source,
            name=base_model,
            buckets=str(buckets),
            bucket=bucket,
            keep_snapshots=keep_snapshots,
            checkpoint_dir=checkpoint_dir,
            models_dir=models_dir,
            allow_folders=allow_folders,
            offload=offload_optimizer,
            options=asdict(options),
        )
        on_phase("starting ranks")
        leading = start_ranks(
            sidecars, settings, ranks=ranks, device=device, timeout_s=rank_timeout_s
        )
        on_phase("idle")
        return create_app(leading, on_phase=on_phase), leading.close
    shelf = AdapterShelf(Path(models_dir) if models_dir else None, allow_folders=allow_folders)
    engine = TrainerEngine(
        source,
        name=base_model,
        snapshots=buckets_of(buckets, keep_snapshots).bucket(bucket),
        checkpoint_dir=Path(checkpoint_dir),
        options=options,
        adapters=shelf,
    )
    on_phase("idle")
    return create_app(engine, on_phase=on_phase), engine.close


def export(
    *,
    buckets: str | Buckets,
    bucket: str,
    identity: str,
    base_model: str,
    source: str,
    folder: str,
    merge_adapter: bool,
    trust_remote_code: bool,
    on_phase: OnPhase,
) -> None:
    """Write a snapshot of ``bucket`` as a model folder.

    Raises:
        NotFoundError: the bucket has no such snapshot.
        EngineError: it cannot be read or written.
    """
    on_phase("reading snapshot")
    snapshot = resolve(buckets_of(buckets).bucket(bucket), identity)
    on_phase("writing model")
    export_snapshot(
        snapshot,
        source,
        base_model,
        Path(folder),
        merge_adapter,
        trust_remote_code=trust_remote_code,
    )
