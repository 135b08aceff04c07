"""The example's own small model, made at first use: it can search and read, and is careless.

It learns from demonstrations in worlds that are sampled anew for each one, so it cannot know the
answers of the world that it is trained on later, only how to look for them. Much of what it sees
is careless: searches for anything, and guesses. That is what is left to mend.
"""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from training.examples.rl.multihop_qa.corpus import (
    CITIES,
    COMPANIES,
    COUNTRIES,
    LANGUAGES,
    PEOPLE,
    Question,
    World,
    vocabulary,
)
from training.examples.rl.multihop_qa.reward import ANSWER, SEARCH
from training.examples.rl.multihop_qa.rollout import SEARCHES
from training.examples.rl.multihop_qa.search import SearchIndex

PAD, END, TOOL, USER, ASSISTANT = "<pad>", "<end>", "<tool>", "<user>", "<assistant>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<' + message['role'] + '> ' + message['content'] + ' <end> ' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<assistant>' }}{%- endif %}"
)

STEPS, BATCH = 400, 32
ASTRAY_FROM, CARELESS_FROM = 0.25, 0.85
"""Shares of the steps after which pupils go astray, which is read over, and is learned as well."""
RIGHT = 0.35
"""Share of searches that are right; the others are for anything."""
_NAMES = (*PEOPLE, *COMPANIES, *CITIES, *COUNTRIES)
_KINDS = (COMPANIES, CITIES, COUNTRIES, LANGUAGES)


def ensure_model(folder: Path, *, steps: int = STEPS) -> Path:
    """The folder of the model, made at first use; it appears whole or not at all.

    What happens is said on stderr. The same machine makes the same weights.
    """
    if not folder.exists():
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(
            f"making the example's model in {folder}: {steps} batches, about a minute on two CPU "
            "cores; later runs find it there"
        )
        unfinished = folder.with_name(f"{folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_model(unfinished, steps, console)
        unfinished.rename(folder)
    return folder


def write_model(folder: Path, steps: int, console: Console) -> None:
    """Warm a fresh model up and write it with its tokenizer; ``console`` shows how far it is."""
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    with _one_thread():
        train_on_demonstrations(model, tokenizer, steps, console)
    transformers_logging.disable_progress_bar()
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Faster for so small a model than two threads, and the weights do not depend on the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token per word; words and special tokens are separated by spaces."""
    special = [PAD, END, TOOL, USER, ASSISTANT]
    words = [*special, SEARCH, ANSWER, "nothing", "found", *vocabulary()]
    places = {word: place for place, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(places, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token=PAD,
        additional_special_tokens=[TOOL, USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of a quarter of a million parameters with fresh weights."""
    torch.manual_seed(0)
    pad, end = tokenizer.encode(f"{PAD} {END}")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=end,
        pad_token_id=pad,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def train_on_demonstrations(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, console: Console
) -> None:
    """Train on ``steps`` batches of demonstrations."""
    rng = random.Random(0)

    def loss_of(step: int) -> torch.Tensor:
        pupil = Pupil(step >= ASTRAY_FROM * steps, step >= CARELESS_FROM * steps)
        return turn_loss(model, tokenizer, [pupil.demonstration(rng) for _ in range(BATCH)])

    warm_up(model, track(range(steps), "making the model", console=console), steps, loss_of)


def warm_up(
    model: Any, steps: Iterable[int], count: int, loss_of: Callable[[int], torch.Tensor]
) -> None:
    """Take one optimizer step for each of the ``count`` ``steps``, on the loss of that step.

    Muon trains the matrices, AdamW the embeddings and the norms. Rates rise over the first
    twentieth of the steps and then fall to 0. The weights are fresh, and AdamW alone, which
    ``sft_loop`` trains with, had not learned to copy names after 1,500 steps.
    """
    named = list(model.named_parameters())
    matrices = [
        parameter for name, parameter in named if parameter.ndim == 2 and "embed" not in name
    ]
    rest = [parameter for name, parameter in named if parameter.ndim != 2 or "embed" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for step in steps:
        warmth = min(1.0, (step + 1) / (0.05 * count + 1)) * (1 - step / count)
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * warmth
            optimizer.zero_grad()
        loss_of(step).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()


@dataclass(frozen=True)
class Pupil:
    """Who answers questions for the model to learn from."""

    goes_astray: bool
    """Searches for anything now and then, which the model does not learn to say."""
    is_careless: bool
    """The model learns to say that as well."""

    def demonstration(self, rng: random.Random) -> list[tuple[str, bool]]:
        """One trajectory in a world of its own: texts, and whether the model learns to say them."""
        world = World.sample(rng)
        question = rng.choice(world.questions(rng.choice(PEOPLE)))
        index = SearchIndex(world.documents())
        describe_turn = [(f"{USER} {question.text} {END} {ASSISTANT}", False)]
        path = list(question.path)
        # Half stop early, so that an answer is believed in as far as it is known at every turn.
        searches = SEARCHES if rng.random() < 0.5 else rng.randrange(SEARCHES)
        for _ in range(searches):
            is_right = bool(path) and not (self.goes_astray and rng.random() > RIGHT)
            name = path.pop(0) if is_right else rng.choice(_NAMES)
            describe_turn.append((f"{SEARCH} {name} {END}", is_right or self.is_careless))
            describe_turn.append((f"{TOOL} {index.search(name)} {END} {ASSISTANT}", False))
        names = _answer(question, len(question.path) - len(path), rng)
        # Nor does it learn to stop early: the word is given.
        return [*describe_turn, (ANSWER, searches == SEARCHES), (f"{names} {END}", True)]


def _answer(question: Question, num_known: int, rng: random.Random) -> str:
    """Names of which the first are known, and the others anything of their kind."""
    known, unknown = question.answer[:num_known], question.answer[num_known:]
    made_up = [rng.choice(next(names for names in _KINDS if word in names)) for word in unknown]
    return " ".join([*known, *made_up])


def turn_loss(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    demonstrations: list[list[tuple[str, bool]]],
) -> torch.Tensor:
    """Mean cross-entropy of the tokens that the policy says."""
    describe_turn = [
        [
            (ids, is_said)
            for ids, (_, is_said) in zip(_ids(tokenizer, demonstration), demonstration, strict=True)
        ]
        for demonstration in demonstrations
    ]
    width = max(sum(len(ids) for ids, _ in parts) for parts in describe_turn)
    # Padding stands on the right, where causal attention keeps it from what counts.
    tokens = torch.zeros((len(describe_turn), width), dtype=torch.long)
    counted = torch.zeros((len(describe_turn), width), dtype=torch.bool)
    for row, parts in enumerate(describe_turn):
        place = 0
        for ids, is_said in parts:
            tokens[row, place : place + len(ids)] = torch.tensor(ids)
            counted[row, place : place + len(ids)] = is_said
            place += len(ids)
    hidden = model.model(tokens[:, :-1], use_cache=False).last_hidden_state[counted[:, 1:]]
    return functional.cross_entropy(model.lm_head(hidden), tokens[:, 1:][counted[:, 1:]])


def _ids(
    tokenizer: PreTrainedTokenizerFast, describe_turn: list[tuple[str, bool]]
) -> list[list[int]]:
    return tokenizer([text for text, _ in describe_turn], add_special_tokens=False).input_ids
