"""Make the quickstart's tiny base model and its rows, from nothing.

``python tools/make_base_model.py`` writes ``model`` and ``data`` of the quickstart; the
same machine gives the same bytes.

Owns the problems and their split, the text that the model learns from, the tokenizer and the
pretraining. The model first reads an answer key, then many careless copies of it: right answers
among slips (a digit off, a forgotten carry, swapped digits), haste and bad form. So it knows
the right answer and says it less than half of the time, which is what GRPO then mends.

Problems are sums and differences of numbers in 0..99 whose result is not negative. Three sets of
problems (operation and unordered operands) share nothing: held-out rows, RL rows, and the rest,
which alone is read here.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

QUICKSTART = Path(__file__).resolve().parent.parent / "src" / "training" / "quickstart"
LARGEST = 99
TRAIN_ROWS = 1024
HELD_OUT_ROWS = 256

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
OPEN, CLOSE = "<answer>", "</answer>"
VOCABULARY = 384
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

WORDINGS = {
    "+": (
        "What is {a} + {b}?",
        "Compute {a} + {b}.",
        "{a} + {b} = ?",
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "Find the sum of {a} and {b}.",
    ),
    "-": (
        "What is {a} - {b}?",
        "Compute {a} - {b}.",
        "{a} - {b} = ?",
        "What is {a} minus {b}?",
        "Subtract {b} from {a}.",
        "Take {b} away from {a}.",
    ),
}
HASTE = ("Quick guess: {slip}", "Easy. {slip}", "At a glance, {slip}")
BAD_FORM = (
    "{answer}",
    "I think it is {answer}.",
    "Let me see. {a} {op} {b}",
    "<answer>{answer}",
    "<answer>about {answer}</answer>",
)
RIGHT, SLIP, HASTY = 0.32, 0.25, 0.28
"""Shares of right answers, slips and hasty slips in the careless copies; the rest is bad form."""


@dataclass(frozen=True)
class Problem:
    """One sum or difference; in the split ``a <= b`` for a sum and ``a >= b`` for a difference."""

    op: str
    a: int
    b: int

    @property
    def answer(self) -> int:
        """The result; never negative."""
        return self.a + self.b if self.op == "+" else self.a - self.b

    def question(self, rng: random.Random) -> str:
        """One of the wordings; the operands of a sum come in either order."""
        a, b = (self.a, self.b) if self.op == "-" or rng.random() < 0.5 else (self.b, self.a)
        return rng.choice(WORDINGS[self.op]).format(a=a, b=b)


def split_problems(seed: int) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """All problems, shuffled and cut into (held out, RL rows, pretraining)."""
    pairs = [(low, high) for low in range(LARGEST + 1) for high in range(low, LARGEST + 1)]
    problems = [Problem("+", low, high) for low, high in pairs]
    problems += [Problem("-", high, low) for low, high in pairs]
    random.Random(seed).shuffle(problems)
    cut = HELD_OUT_ROWS + TRAIN_ROWS
    return problems[:HELD_OUT_ROWS], problems[HELD_OUT_ROWS:cut], problems[cut:]


def slip(problem: Problem, rng: random.Random) -> int:
    """A wrong result of the kind that a careless pupil writes."""
    answer = problem.answer
    swapped = int(str(answer)[::-1])
    carry = 10 if problem.op == "-" else -10
    wrong = [answer + 1, answer - 1, answer + carry, swapped, answer - carry]
    weighted = zip(wrong, (3, 3, 3, 2, 1), strict=True)
    choices = [(number, weight) for number, weight in weighted if 0 <= number != answer]
    numbers, weights = zip(*choices, strict=True)
    return rng.choices(numbers, weights)[0]


def careless_reply(problem: Problem, rng: random.Random) -> str:
    """A right answer, a slip, a hasty slip or bad form, in the shares above."""
    chance = rng.random()
    if chance < RIGHT:
        return key_reply(problem)
    wrong = f"{OPEN}{slip(problem, rng)}{CLOSE}"
    if chance < RIGHT + SLIP:
        return wrong
    if chance < RIGHT + SLIP + HASTY:
        return rng.choice(HASTE).format(slip=wrong)
    form = rng.choice(BAD_FORM)
    return form.format(answer=problem.answer, a=problem.a, b=problem.b, op=problem.op)


def key_reply(problem: Problem) -> str:
    """The right answer in its tags."""
    return f"{OPEN}{problem.answer}{CLOSE}"


def prompt_text(question: str) -> str:
    """The chat template's rendering of one user turn and the opening of the reply."""
    return f"{START}user\n{question}{END}\n{START}assistant\n"


def make_tokenizer(problems: list[Problem], rng: random.Random) -> PreTrainedTokenizerFast:
    """Byte-level BPE from the task's own text: a token per digit, and any text is lossless."""
    text = ["user\n", "assistant\n", "system\n"] * len(problems)
    for problem in problems:
        reply = careless_reply(problem, rng).removeprefix(OPEN).removesuffix(CLOSE)
        text += [problem.question(rng), reply]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, START, END],
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.add_tokens([AddedToken(OPEN, normalized=False), AddedToken(CLOSE, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of half a million parameters with fresh weights."""
    pad, end = tokenizer.encode(PAD + END)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=end,
        pad_token_id=pad,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, do_sample=True)
    return model


@dataclass
class Pretraining:
    """Next-token training on replies: matrices by Muon, the rest by AdamW, linear decay."""

    model: Qwen3ForCausalLM
    tokenizer: PreTrainedTokenizerFast
    rng: random.Random

    def __post_init__(self) -> None:
        """Make the two optimizers."""
        named = list(self.model.named_parameters())
        matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
        rest = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.0, betas=(0.9, 0.98)),
        ]
        self.rates = [optimizer.param_groups[0]["lr"] for optimizer in self.optimizers]

    def run(
        self, problems: list[Problem], reply: Callable[[Problem], str], *, steps: int, scale: float
    ) -> float:
        """Train ``steps`` batches of 256 at ``scale`` times the rates; returns the last loss."""
        loss = torch.zeros(())
        for step in range(steps):
            warmth = min(1.0, (step + 1) / (0.05 * steps + 1)) * (1 - step / steps)
            for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
                optimizer.param_groups[0]["lr"] = rate * warmth * scale
                optimizer.zero_grad()
            loss = self.loss(self.rng.choices(problems, k=256), reply)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
        return float(loss.detach())

    def loss(self, problems: list[Problem], reply: Callable[[Problem], str]) -> torch.Tensor:
        """Mean cross-entropy of the replies' tokens."""
        prompts = [prompt_text(problem.question(self.rng)) for problem in problems]
        asked = self.tokenizer(prompts).input_ids
        answered = self.tokenizer([reply(problem) + END for problem in problems]).input_ids
        width = max(len(a) + len(b) for a, b in zip(asked, answered, strict=True))
        # Padding stands on the right, where causal attention keeps it from what counts.
        tokens = torch.zeros((len(problems), width), dtype=torch.long)
        labels = torch.full((len(problems), width), -100)
        for row, (prompt, answer) in enumerate(zip(asked, answered, strict=True)):
            end = len(prompt) + len(answer)
            tokens[row, :end] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : end] = torch.tensor(answer)
        targets = labels[:, 1:]
        counted = targets >= 0
        hidden = self.model.model(tokens[:, :-1], use_cache=False).last_hidden_state[counted]
        return functional.cross_entropy(self.model.lm_head(hidden), targets[counted])


def write_rows(path: Path, problems: list[Problem], rng: random.Random) -> None:
    """One JSON line per problem: ``messages`` with the question, ``ground_truth``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            messages = [{"role": "user", "content": problem.question(rng)}]
            row = {"messages": messages, "ground_truth": str(problem.answer)}
            file.write(json.dumps(row) + "\n")


@torch.inference_mode()
def accuracy(folder: Path, rows: Path, *, greedy: bool) -> float:
    """Share of a file's rows that the written model answers rightly and in its tags."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = 0
    lines = rows.read_text(encoding="utf-8").splitlines()
    for line in lines:
        row = json.loads(line)
        asked = tokenizer(prompt_text(row["messages"][0]["content"]), return_tensors="pt")
        how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0}
        # transformers' own annotations do not bind here.
        generated = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            **asked, **how, max_new_tokens=16
        )
        reply = tokenizer.decode(
            generated[0, asked["input_ids"].shape[1] :], skip_special_tokens=True
        )
        right += reply == f"{OPEN}{row['ground_truth']}{CLOSE}"
    return right / len(lines)


def main() -> None:
    """Make the tokenizer, the model and the rows, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=QUICKSTART, help="folder of model and data")
    parser.add_argument("--key-steps", type=int, default=800, help="batches of right answers")
    parser.add_argument(
        "--careless-steps", type=int, default=200, help="batches of careless copies"
    )
    given = parser.parse_args()
    started = time.perf_counter()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    held_out, train, seen = split_problems(seed=0)
    tokenizer = make_tokenizer(seen, random.Random(0))
    rng = random.Random(1)
    model = build_model(tokenizer)
    pretraining = Pretraining(model, tokenizer, rng)
    print("key loss", pretraining.run(seen, key_reply, steps=given.key_steps, scale=1.0))
    careless = pretraining.run(
        seen, lambda problem: careless_reply(problem, rng), steps=given.careless_steps, scale=1 / 3
    )
    print("careless loss", careless, "after", round(time.perf_counter() - started), "s")

    data = given.output / "data"
    write_rows(data / "train.jsonl", train, random.Random(2))
    write_rows(data / "heldout.jsonl", held_out, random.Random(3))
    # bfloat16 precision in float32 files: any dtype loads the same numbers.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(given.output / "model")
    tokenizer.save_pretrained(given.output / "model")
    size = sum(path.stat().st_size for path in (given.output / "model").iterdir())
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters, {size} bytes")
    for greedy in (False, True):
        share = accuracy(given.output / "model", data / "heldout.jsonl", greedy=greedy)
        print("held-out accuracy", "greedy" if greedy else "at temperature 1", share)


if __name__ == "__main__":
    main()
