"""Facts about a deployment's model that are read without loading its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hearth.errors import ConfigError, EngineError
from hearth.inference.vllm.options import VllmOptions
from hearth.models.experts import find_experts
from hearth.models.loading import UNBOUNDED_POSITIONS, base_tensors, loading_lock
from hearth.sync.store import Snapshot


@dataclass(frozen=True)
class VllmModelFacts:
    """A causal LM without its weights."""

    name: str
    """What it is called on the wire."""
    source: str
    shapes: Mapping[str, tuple[int, ...]]
    """Of ``models.loading.base_tensors``, by their names."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_position: int
    has_experts: bool
    """Whether it is a mixture of experts."""

    def check_options(self, options: VllmOptions) -> None:
        """Refuse adapters that vLLM will not be able to serve, before a server is started.

        Raises:
            ConfigError: they will change a mixture's experts.
        """
        if self.has_experts and options.train_mlp:
            raise ConfigError(
                "lora_targets must leave out 'mlp' for a mixture of experts with engine 'vllm', "
                "which serves no adapter of experts, got train_mlp=True: choose ['attn'], engine "
                "'embedded', or first_checkpoint_type 'merged_base', which sends the whole model "
                "in each weight sync"
            )

    def check(self, snapshot: Snapshot) -> None:
        """Refuse a snapshot that is not of this model.

        Raises:
            EngineError: it is of another base model, or a name or a shape of a base differs.
        """
        if snapshot.base_model not in (self.name, self.source):
            raise EngineError(
                f"snapshot {snapshot.identity!r} must be of {self.name!r}, which is served, got "
                f"one of {snapshot.base_model!r}"
            )
        if snapshot.kind == "lora":
            return
        if snapshot.entries is not None:
            shapes = {name: tuple(entry["shape"]) for name, entry in snapshot.entries.items()}
        else:
            weights = snapshot.weights or {}
            shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        if shapes == self.shapes:
            return
        different = [
            f"{name} {shapes.get(name, 'missing')} instead of {self.shapes.get(name, 'nothing')}"
            for name in sorted(shapes.keys() | self.shapes.keys())
            if shapes.get(name) != self.shapes.get(name)
        ]
        raise EngineError(
            f"snapshot {snapshot.identity!r} must fit the model that is served: weights must have "
            f"the model's names and shapes, got {different[:3]} ({len(different)} in all)"
        )


def read_facts(source: str, *, name: str, trust_remote_code: bool = False) -> VllmModelFacts:
    """The facts of a folder or hub id; no weight is read.

    Raises:
        ConfigError: transformers knows no causal LM there.
    """
    # Importing it takes two seconds; the worker has done so.
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(
            source, trust_remote_code=trust_remote_code
        )
        # A model that loads on another thread changes how transformers ties weights meanwhile.
        with loading_lock, torch.device("meta"):
            module = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"base_model must be a causal LM's folder or hub id, got {source!r}: {error}"
        ) from None
    text = config.get_text_config()
    return VllmModelFacts(
        name=name,
        source=source,
        shapes={key: tuple(tensor.shape) for key, tensor in base_tensors(module).items()},
        eos_token_ids=_eos_token_ids(source, text.eos_token_id),
        vocab_size=int(module.get_input_embeddings().num_embeddings),
        max_position=int(getattr(text, "max_position_embeddings", None) or UNBOUNDED_POSITIONS),
        has_experts=bool(find_experts(module)),
    )


def _eos_token_ids(source: str, of_config: int | list[int] | None) -> tuple[int, ...]:
    """Token ids that end a generation, as the embedded engine finds them."""
    import transformers

    try:
        own = transformers.GenerationConfig.from_pretrained(source).eos_token_id
    except OSError:  # it has none
        own = None
    eos = of_config if own is None else own
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
