"""The settings of recipes that train on given answers, beside those of all recipes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from training.config.parts import TokenizerConfig
from training.config.recipe import RecipeConfig
from training.config.validation import counts_below_one


@dataclass(kw_only=True)
class SupervisedConfig(RecipeConfig):
    """Settings of ``sft_loop`` and ``dpo_loop``: nothing is sampled, so there is no deployment."""

    batch_size: int = 32
    """Rows per optimizer step. The trainer packs them into passes of trainer.micro_batch_tokens."""
    shuffle: bool = True
    """Give each epoch its own order."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer and with it the chat template."""

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        """The tokenizer, that of the base model where none is named."""
        return self.name_tokenizer(self.tokenizer)


def supervised_problems(config: SupervisedConfig) -> Iterator[str]:
    """A line for each setting of a supervised recipe that breaks its rule."""
    yield from counts_below_one(config, "batch_size")
