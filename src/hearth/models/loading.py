"""Causal LMs and tokenizers, from a folder or the hub into memory and back into a folder.

Owns the errors of loading and the names of the weights. Training, sampling and adapters are
elsewhere.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from hearth.errors import ConfigError, EngineError
from hearth.threads import use_one_if_small

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""Names of the dtypes that models are loaded in."""

UNBOUNDED_POSITIONS = 2**30
"""``max_position`` of a model whose config has no limit."""

# transformers patches torch.nn.init and torch's default dtype while it loads, for all threads.
loading_lock = threading.Lock()


@dataclass(frozen=True)
class LoraOptions:
    """Which layers an adapter changes, and how. The update is scaled by ``alpha / rank``."""

    rank: int
    """At least 1."""
    alpha: float = 32.0
    """Above 0."""
    seed: int = 0
    """Fixes the initial values."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False
    train_experts: bool = True
    """Whether ``train_mlp`` counts in a mixture, for its experts and the MLPs beside them. Adapters
    of earlier versions leave them alone."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora rank must be >= 1, got {self.rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"lora alpha must be finite and > 0, got {self.alpha}")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ConfigError(
                "lora must train at least one of attn, mlp and unembed, got none of them"
            )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> LoraOptions:
        """The options in a snapshot's or checkpoint's ``metadata["lora"]``.

        Raises:
            EngineError: there are none.
        """
        try:
            # Adapters that say nothing of experts are of versions that left a mixture's MLPs alone.
            return cls(**{"train_experts": False, **metadata["lora"]})
        except (KeyError, TypeError) as error:
            raise EngineError(f"metadata must describe a LoRA adapter, got {error}") from None

    @property
    def changes_experts(self) -> bool:
        """Whether a mixture's adapter changes its experts."""
        return self.train_mlp and self.train_experts

    def as_metadata(self) -> dict[str, Any]:
        """What ``from_metadata`` reads: ``{"lora": {...}}``."""
        return {"lora": asdict(self)}


@dataclass(frozen=True, eq=False)
class CommonWeights:
    """Tensors that models of this process compute with and none changes: a module that is not run.

    It lives as long as one of them.
    """

    module: nn.Module


_common: WeakValueDictionary[tuple[Any, ...], CommonWeights] = WeakValueDictionary()
"""By folder or hub id, the files in the folder, and dtype."""


@dataclass
class LoadedModel:
    """A causal LM in memory, in eval mode: no dropout, the same numbers in every pass."""

    module: nn.Module
    """The transformers module; a LoRA adapter replaces some of its linear layers in place."""
    name: str
    """Its name on the wire."""
    source: str
    """The folder or hub id that it was loaded from."""
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    """Token ids that end a generation; may be empty."""
    vocab_size: int
    """Rows of the embedding: token ids are below it."""
    max_position: int
    """Longest sequence, in tokens, that the model has positions for."""
    lora: LoraOptions | None = None
    """The options of the attached adapter."""
    common: CommonWeights | None = None
    """What keeps its tensors for other models; None where they are its own."""

    @property
    def config(self) -> Any:
        """The module's transformers config."""
        return self.module.config


def load_model(
    source: str | Path,
    *,
    name: str | None = None,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    shard: Callable[[nn.Module], None] | None = None,
    share: bool = False,
) -> LoadedModel:
    """Load any causal LM that transformers knows, from a folder or a hub id.

    ``name`` defaults to the source. Attention is SDPA where the architecture has it.
    The weights require gradients until a caller freezes them.
    ``shard`` is called with the module before it has weights (they are on the meta device), to make
    DTensors of them: only this rank's parts are then read, into the host's memory.
    With ``share``, models of one folder on the CPU have the same tensors: whoever changes one in
    place calls ``own_weights`` first.

    Raises:
        ConfigError: the folder does not exist, the hub does not answer, the architecture is
            unknown or no causal LM, weights are missing or misshapen, the dtype or device is not
            usable, or memory is short.
    """
    # Importing takes two seconds, which `hearth --help` must not.
    import transformers

    where = _check_source(source, "base_model")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    target = _check_device(device)
    share = share and target.type == "cpu"
    with loading_lock, _hide_progress_bars(), _convert_errors(where, target):
        folder = _resolve_source(where)
        key = (folder, _describe_files(folder), dtype) if share else ()
        common = _common.get(key)
        maker: Any = transformers.AutoModelForCausalLM
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if shard is not None:
            maker, options = _shard_when_made(folder, shard, options)
        if common is not None:
            module = _copy_module(common.module)
        else:
            module = _read_module(maker, folder, dtype=DTYPES[dtype], **options)
            module = module.eval() if shard is not None else module.to(target).eval()
        if share and common is None:
            common = _common[key] = CommonWeights(_copy_module(module))
    if shard is not None:
        # Its own class again.
        module.__class__ = maker.__base__
    config = module.config.get_text_config()
    return LoadedModel(
        module=module,
        name=name or where,
        source=where,
        dtype=DTYPES[dtype],
        device=target,
        eos_token_ids=_read_eos_token_ids(module),
        vocab_size=int(module.get_input_embeddings().num_embeddings),
        max_position=int(getattr(config, "max_position_embeddings", None) or UNBOUNDED_POSITIONS),
        common=common,
    )


def _read_module(maker: Any, folder: str, **options: Any) -> Any:
    """The module of a folder or hub id, with all of its weights."""
    module, report = maker.from_pretrained(folder, output_loading_info=True, **options)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(
            f"base_model must hold every weight of its architecture, got {folder!r} without "
            f"{missing[:4]} ({len(missing)} in all)"
        )
    return module


def _describe_files(folder: str) -> tuple[Any, ...]:
    """Names, sizes and times of a folder's files; nothing of a hub id."""
    if not Path(folder).is_dir():
        return ()
    facts = [(path.name, path.stat()) for path in Path(folder).iterdir()]
    return tuple(sorted((name, fact.st_size, fact.st_mtime_ns) for name, fact in facts))


def _copy_module(module: nn.Module) -> Any:
    """A module of the same structure, whose tensors are other views of the same memory."""
    views: dict[int, Tensor] = {id(buffer): buffer.detach() for buffer in module.buffers()}
    for parameter in module.parameters():
        views[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    return copy.deepcopy(module, views)


def own_weights(loaded: LoadedModel) -> None:
    """Give a model tensors of its own, to change in place, where it has those of others."""
    if loaded.common is None:
        return
    for tensor in (*loaded.module.parameters(), *loaded.module.buffers()):
        tensor.data = tensor.data.clone()
    loaded.common = None


def _shard_when_made(
    folder: str, shard: Callable[[nn.Module], None], options: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The model's class with ``shard`` at the end of its constructor, and what to load it with.

    transformers makes the module on the meta device, then reads of each DTensor this rank's part.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, **options)
    with torch.device("meta"):
        made: Any = transformers.AutoModelForCausalLM.from_config(config, **options)
    kind: Any = type(made)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, *args, **kwargs)
        with torch.device("cpu"):
            shard(self)

    own = {"__init__": init, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), own), {"config": made.config}


def share_weights(loaded: LoadedModel) -> LoadedModel:
    """Another model on the same weights, in modules of its own, so that an adapter changes only it.

    Its tensors are those of ``loaded``, not copies; it has no adapter.
    """
    tensors = (*loaded.module.parameters(), *loaded.module.buffers())
    module = copy.deepcopy(loaded.module, {id(tensor): tensor for tensor in tensors})
    return replace(loaded, module=module, lora=None)


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a folder or hub id.

    Raises:
        ConfigError: there is none, or the hub does not answer.
    """
    # Importing takes two seconds, as above.
    import transformers

    # Texts are encoded one at a time: the tokenizer's own threads only take time from the engines.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    where = _check_source(source, "tokenizer")
    with loading_lock:
        try:
            return transformers.AutoTokenizer.from_pretrained(
                _resolve_source(where), trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"tokenizer must be a tokenizer's folder or hub id, got {where!r}: "
                f"{_first_line(error)}"
            ) from None


def base_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The model's own weights by their plain names: not copied, shared tensors once, no adapter.

    Parameters and persistent buffers. An attached adapter does not change their names.
    """
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if ".lora_" in name or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        tensors[name.replace(".base_layer.", ".")] = tensor
    return tensors


def load_base_tensors(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` over the model's own weights.

    Raises:
        EngineError: names or shapes differ; nothing was changed.
    """
    copy_tensors(tensors, base_tensors(module))


def copy_tensors(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` over a model's ``own``; raises as ``check_same_tensors``."""
    check_same_tensors(own, tensors)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def check_same_tensors(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not fit a model's.

    Raises:
        EngineError: names or shapes differ; the first few are named.
    """
    missing, unknown = sorted(own.keys() - given.keys()), sorted(given.keys() - own.keys())
    if missing or unknown:
        raise EngineError(
            f"weights must have the model's tensor names, got {len(missing)} missing "
            f"{missing[:3]} and {len(unknown)} unknown {unknown[:3]}"
        )
    for name, tensor in own.items():
        if tensor.shape != given[name].shape:
            raise EngineError(
                f"weights must have the model's shapes, got {name} {list(given[name].shape)} "
                f"instead of {list(tensor.shape)}"
            )


def describe_non_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor that holds NaN or an infinity, and how many; None where all are finite."""
    with use_one_if_small(sum(tensor.numel() for tensor in tensors.values())):
        for name, tensor in tensors.items():
            if not tensor.is_floating_point() or tensor.numel() == 0:
                continue
            # One pass that copies nothing; NaN is both the least and the greatest value.
            least, greatest = torch.aminmax(tensor.detach())
            if not bool(torch.stack([least, greatest]).isfinite().all()):
                count = int((~tensor.isfinite()).sum())
                return f"{count} of {tensor.numel()} values of {name!r} that are not"
    return None


def export_pretrained(loaded: LoadedModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Write ``tensors`` as a Hugging Face model folder that ``AutoModelForCausalLM`` loads.

    Config and generation config are the loaded model's; ``tensors`` are named as
    ``base_tensors`` names them, and may hold a tied head's weight in addition, which unties it.
    The tokenizer is the model's own, if it has one.

    Raises:
        EngineError: the tensors are not those of the model.
    """
    module: Any = loaded.module
    expected = base_tensors(module)
    head = tied_head_name(module)
    if head is not None and head in tensors:
        expected[head] = tensors[head]
    check_same_tensors(expected, tensors)
    is_tied = head is not None and head not in tensors
    with loading_lock, _hide_progress_bars(), _set_tied(module.config, is_tied):
        state = {name: tensor.detach() for name, tensor in tensors.items()}
        module.save_pretrained(str(folder), state_dict=state)
    save_tokenizer(loaded, folder)


def save_tokenizer(loaded: LoadedModel, folder: Path) -> None:
    """Write the model's own tokenizer, with its chat template, into a folder; nothing without."""
    with contextlib.suppress(ConfigError):
        load_tokenizer(loaded.source).save_pretrained(str(folder))


def tied_head_name(module: Any) -> str | None:
    """The plain name of the head's weight when it is the embedding's; None when it is its own."""
    head = module.get_output_embeddings()
    name = next((name for name, layer in module.named_modules() if layer is head), None)
    weight = f"{name}.weight"
    return None if name is None or weight in base_tensors(module) else weight


def _check_source(source: str | Path, field: str) -> str:
    where = str(source)
    path = Path(where).expanduser()
    if where and path.is_dir():
        return str(path)
    is_path = isinstance(source, Path) or where.startswith((".", "/", "~")) or where.count("/") > 1
    if is_path or not where:
        raise ConfigError(f"{field} must be an existing folder or a hub id, got {where!r}")
    return where


def _resolve_source(where: str) -> str:
    """The folder, the hub id, or its cached copy when the hub does not answer.

    One request up front: transformers itself requests many files, and retries each for a while.

    Raises:
        OSError: the hub knows no such model, or does not answer and there is no cached copy.
    """
    if Path(where).is_dir():
        return where
    # Importing it costs nothing: the caller has imported transformers.
    import huggingface_hub
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        huggingface_hub.HfApi().model_info(where, timeout=10)
        return where
    except RepositoryNotFoundError:
        raise
    except (OSError, HTTPError) as error:
        unreachable = f"the hub cannot be reached ({error}) and there is no copy in its cache"
    try:
        return huggingface_hub.snapshot_download(where, local_files_only=True)
    except LocalEntryNotFoundError:
        raise OSError(unreachable) from None


def _check_device(device: str | torch.device) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be a torch device, got {device!r}: {error}") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device must be available, got {device!r}: no CUDA device found")
    return target


def _read_eos_token_ids(module: Any) -> tuple[int, ...]:
    generation = getattr(module, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = module.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


@contextlib.contextmanager
def _hide_progress_bars() -> Iterator[None]:
    # A recipe's terminal belongs to the recipe.
    from transformers.utils import logging as transformers_logging

    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _set_tied(config: Any, is_tied: bool) -> Iterator[None]:
    """Let the config say inside the ``with`` whether the head is tied."""
    before = config.tie_word_embeddings
    config.tie_word_embeddings = before and is_tied
    try:
        yield
    finally:
        config.tie_word_embeddings = before


@contextlib.contextmanager
def _convert_errors(where: str, device: torch.device) -> Iterator[None]:
    """Convert exceptions of transformers and torch to a ConfigError of one line."""
    try:
        yield
    except ConfigError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ConfigError(_describe_memory_error(where, device, error)) from None
    except pickle.UnpicklingError:
        raise ConfigError(
            f"base_model must hold weights and nothing else, got {where!r}, whose pickle names "
            "other objects: save it as safetensors where it comes from"
        ) from None
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        if "not enough memory" in str(error) or "out of memory" in str(error):
            raise ConfigError(_describe_memory_error(where, device, error)) from None
        raise ConfigError(
            f"base_model must be a causal LM's folder or hub id that can be loaded, got "
            f"{where!r}: {_first_line(error)}{_explain_code(error)}"
        ) from None


def _explain_code(error: BaseException) -> str:
    if "custom code" not in str(error):
        return ""
    return " If you trust that code, a catalog entry with trust_remote_code = true runs it"


def _describe_memory_error(where: str, device: torch.device, error: BaseException) -> str:
    return (
        f"base_model must fit the memory of {device}, got {where!r}: {_first_line(error)}; use "
        "dtype='bfloat16', a smaller model or another device"
    )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def best_device() -> str:
    """``cuda`` where there is a GPU, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(dtype: str | None, device: str) -> str:
    """``dtype``, or where it is None the fast one of a device: bfloat16 of a GPU, else float32."""
    if dtype is not None:
        return dtype
    return "bfloat16" if device.startswith("cuda") else "float32"
