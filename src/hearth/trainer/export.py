"""A sampler snapshot as a folder that plain ``transformers`` or PEFT loads. Needs no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from hearth.errors import ConfigError, EngineError
from hearth.models.loading import DTYPES, export_pretrained, load_model, save_tokenizer
from hearth.models.lora import (
    LoraOptions,
    attach_lora,
    load_adapter_tensors,
    merge_tensors,
    write_adapter,
)
from hearth.sync.folders import write_draft
from hearth.sync.store import Snapshot


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How a snapshot is exported."""

    base_model: str
    source: str
    folder: str
    merge_adapter: bool = False
    """Write an adapter's snapshot as a whole model with the adapter merged in."""
    trust_remote_code: bool = False
    card: str = ""
    """Text of the folder's README.md, the model card; without any there is none."""


def export_snapshot(snapshot: Snapshot, options: ExportOptions) -> None:
    """Write a whole snapshot (no delta) to the folder, which appears complete or not at all.

    Full weights give a model folder in the snapshot's dtype, with the source's tokenizer. An
    adapter gives PEFT's two files and the tokenizer, or with ``merge_adapter`` a model folder with
    the adapter merged into the source's weights, in their dtype.

    Raises:
        EngineError: the snapshot is of another model or does not fit the source, or the source
            cannot be loaded.
        RequestError: the folder exists.
    """
    base_model, trust = options.base_model, options.trust_remote_code
    if snapshot.base_model != base_model:
        raise EngineError(
            f"snapshot {snapshot.identity!r} must be of {base_model!r}, got one of "
            f"{snapshot.base_model!r}"
        )
    is_adapter = snapshot.kind == "lora"
    dtype = _source_dtype(options.source, trust) if is_adapter else _dtype_of(snapshot.tensors)
    try:
        loaded = load_model(options.source, name=base_model, dtype=dtype, trust_remote_code=trust)
        with write_draft(Path(options.folder).expanduser()) as draft:
            if is_adapter:
                attach_lora(loaded, LoraOptions.from_metadata(snapshot.metadata))
                load_adapter_tensors(loaded, snapshot.tensors)
            if not is_adapter:
                export_pretrained(loaded, snapshot.tensors, draft)
            elif options.merge_adapter:
                export_pretrained(loaded, merge_tensors(loaded), draft)
            else:
                write_adapter(loaded, draft)
                save_tokenizer(loaded, draft)
            if options.card:
                (draft / "README.md").write_text(options.card, encoding="utf-8")
            _make_readable(draft)
    except (ConfigError, OSError, SafetensorError) as error:
        raise EngineError(
            f"snapshot {snapshot.identity!r} could not be exported: {error}"
        ) from error


def _make_readable(folder: Path) -> None:
    """Let who may enter the folder read its files; safetensors writes them for their owner only."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.iterdir():
        path.chmod(mode)


def _dtype_of(tensors: Mapping[str, Tensor]) -> str:
    """Name of the dtype of the first weight that has one that models are loaded in."""
    names = (str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())
    return next((name for name in names if name in DTYPES), "float32")


def _source_dtype(source: str, trust_remote_code: bool) -> str:
    """Name of the dtype that the source's own config states; float32 where it states none."""
    # Takes two seconds; only exports need it.
    import transformers

    try:
        config: Any = transformers.AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError):
        # Loading it gives the same error with a better message.
        return "float32"
    name = str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES else "float32"
