"""What a trainer's own process runs: its engine and its app, and the export of a snapshot.

A forkserver imports this module before it forks such processes, and with it all slow libraries.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette

# Imported here so that the forkserver has them; each process would spend seconds on it.
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401 - see above

from hearth.errors import ConfigError
from hearth.sidecars import Sidecars
from hearth.sync.chain import resolve
from hearth.sync.objects import open_buckets
from hearth.sync.store import Buckets, SnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.export import ExportOptions, export_snapshot
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.ranks.start import start_ranks
from hearth.trainer.service import create_app

logger = logging.getLogger(__name__)

OnPhase = Callable[[str], None]


def build(
    *, sidecars: Sidecars, on_phase: OnPhase, **values: Any
) -> tuple[Starlette, Callable[[], None]]:
    """The app of a trainer, and what closes it; ``values`` are of ``TrainerWorkerOptions``.

    ``on_phase`` is called with the name of each phase that begins.

    Raises:
        ConfigError: the model cannot be loaded, or an option breaks its rule.
    """
    options = TrainerWorkerOptions.from_values(values)
    logger.info("the trainer computes in %s on %s", options.dtype, options.device)
    if options.ranks > 1 and not isinstance(options.buckets, str):
        raise ConfigError(
            f"ranks must be 1 with the inline placement, got {options.ranks}: a process group does "
            "not belong into the user's process; use placement='process', or hearth serve"
        )
    if options.ranks == 1 and options.offload_optimizer:
        raise ConfigError(
            "offload_optimizer must be off with ranks=1, got True: only weights that ranks share "
            "can be kept in the host's memory"
        )
    if options.ranks > 1:
        on_phase("starting ranks")
        engine = start_ranks(sidecars, options)
    else:
        on_phase("loading model")
        engine = TrainerEngine(**options.engine_arguments())
    on_phase("idle")
    return create_app(engine, on_phase=on_phase), engine.close


def export(
    *,
    buckets: str | Buckets[SnapshotStore],
    bucket: str,
    identity: str,
    on_phase: OnPhase,
    **values: Any,
) -> None:
    """Write a snapshot of ``bucket`` as a model folder; ``values`` are of ``ExportOptions``.

    Raises:
        NotFoundError: the bucket has no such snapshot.
        EngineError: it cannot be read or written.
    """
    on_phase("reading snapshot")
    snapshot = resolve(open_buckets(buckets).bucket(bucket), identity)
    on_phase("writing model")
    export_snapshot(snapshot, ExportOptions(**values))
