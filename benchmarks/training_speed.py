"""Training alone: tokens per second and their share of sgemm, and what a custom loss costs more.

The batch is that of ``grpo_step.py --fixed-len``: 8 prompts of some 22 tokens, 8 completions of
each, 64 tokens per completion, of random digits; AdamW in float32.

**Throughput** is ``TrainerEngine.forward_backward`` (the built-in ``ppo`` loss) and ``optim_step``,
called directly. *tokens/s* are trained tokens, of the completions alone. *GFLOP/s* count

- 6 per parameter and computed token, two of the forward pass and four of the backward pass
  (arXiv:2001.08361). Computed is each prompt once per group, and of each completion all tokens but
  the last. Parameters are all of the model's: the tied embedding once, for its product as the
  head; a lookup is no arithmetic.
- 12 x layers x heads x size of a head per computed token and token that attention lets it see,
  itself included: products of queries and keys, weights and values, 2 each, and twice that
  backward. Scores that the backward pass computes once more are not counted.

Norms, rotation, softmax, loss and optimizer are not counted, but take time. *share* is that rate
over what products of 1024 x 1024 matrices reach (``sgemm_gflops``), with as many threads in the
same process, before or after the steps, whichever is higher.

**Custom loss**: ``forward_backward_custom`` with the recipes' GRPO closure over
``forward_backward`` with the same loss built in, on the same samples, from samples to result as
``PolicyUpdate`` does it, over the SDK on the platform embedded in this process. Both in turn, and
after each an optimizer step of learning rate 0 that is not timed, whose gradient norm must be the
same for both. CPU seconds are those of all threads.

Rounds go A B C A B C; a figure is the median of its rounds, a ratio the median of theirs. A round's
figure of throughput is the mean of the faster half of its steps.

    python benchmarks/training_speed.py [--models 1m 3m 10m] [--custom 1m 3m] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Idle OpenMP threads that spin take the cores from whoever works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import numpy as np
import tinker
import torch
from workload import SIZES, make_model, make_rows, make_tokenizer, processor, sgemm_gflops

from hearth.local import EmbeddedPlatform
from hearth.losses.clipped import GRPO
from hearth.sdk import TrainerJobManager
from hearth.sdk.training import FiretitanTrainingClient
from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumRecord
from training.samples.groups import TrainSample
from training.samples.rollout import RolloutSample
from training.update.builtin_loss import BuiltinLoss
from training.utils import ResourceCleanup
from training.utils.rl import make_policy_loss_fn, setup_infra

PROMPTS, GROUP, NEW_TOKENS = 8, 8, 64
WARM_UP = 2
"""Steps, or calls of each kind, left out at the start."""
TOLERANCE = 1e-3
"""How far gradient norms of the two ways may be from each other, as a share."""


@dataclass(frozen=True)
class Throughput:
    """One round of one model."""

    tokens_per_s: float
    computed_tokens_per_s: float
    gflops: float
    """Per second."""
    sgemm_gflops_before_after: tuple[float, float]

    @property
    def share(self) -> float:
        """Of sgemm."""
        return self.gflops / max(self.sgemm_gflops_before_after)


@dataclass(frozen=True)
class CustomLoss:
    """One call of each kind, one after the other."""

    custom_s: float
    builtin_s: float
    custom_cpu_s: float
    builtin_cpu_s: float


@dataclass(frozen=True)
class Text:
    """A prompt and one completion of it."""

    tokens: list[int]
    prompt_len: int
    advantage: float


def texts(seed: int = 0) -> list[Text]:
    """The batch, group after group."""
    tokenizer = make_tokenizer()
    digits = tokenizer.encode("0123456789")
    chance = random.Random(seed)
    prompts = [tokenizer.encode(row["messages"][0]["content"]) for row in make_rows(PROMPTS)]
    return [
        Text([*prompt, *chance.choices(digits, k=NEW_TOKENS)], len(prompt), chance.gauss(0, 1))
        for prompt in prompts
        for _ in range(GROUP)
    ]


def computed_tokens(batch: Sequence[Text]) -> int:
    """Tokens that pass through the model."""
    prompts = sum(sample.prompt_len for sample in batch[::GROUP])
    return prompts + sum(len(sample.tokens) - 1 - sample.prompt_len for sample in batch)


def step_flops(size: str, params: int, batch: Sequence[Text]) -> float:
    """Floating-point operations of one step, as the module's docstring counts them."""
    pairs = sum(_causal(sample.prompt_len) for sample in batch[::GROUP])
    for sample in batch:
        own = len(sample.tokens) - 1 - sample.prompt_len
        pairs += own * sample.prompt_len + _causal(own)
    shape = SIZES[size]
    per_pair = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    return 6.0 * params * computed_tokens(batch) + 12.0 * per_pair * pairs


def _causal(tokens: int) -> int:
    return tokens * (tokens + 1) // 2


class DirectTrainer:
    """A trainer's engine with its batch."""

    def __init__(self, size: str, folder: Path) -> None:
        self._engine = TrainerEngine(
            make_model(folder / "model", size, fixed_length=True),
            snapshots=MemorySnapshotStore(),
            checkpoint_dir=folder / "checkpoints",
        )
        self._model_id = self._engine.create_model()
        batch = texts()
        self._data = [record(sample) for sample in batch]
        self._tokens = computed_tokens(batch)
        self._flops = step_flops(size, count_parameters(folder / "model"), batch)
        for _ in range(WARM_UP):
            self._step()

    def round(self, steps: int) -> Throughput:
        """Some steps between two measurements of the machine."""
        before = sgemm_gflops()
        faster = sorted(timed(self._step)[0] for _ in range(steps))[: max(1, steps // 2)]
        after = sgemm_gflops()
        mean_s = statistics.fmean(faster)
        return Throughput(
            tokens_per_s=round(PROMPTS * GROUP * NEW_TOKENS / mean_s, 1),
            computed_tokens_per_s=round(self._tokens / mean_s, 1),
            gflops=round(self._flops / mean_s / 1e9, 1),
            sgemm_gflops_before_after=(round(before, 1), round(after, 1)),
        )

    def close(self) -> None:
        """Free the model."""
        self._engine.close()

    def _step(self) -> None:
        self._engine.forward_backward(self._model_id, self._data, "ppo")
        self._engine.optim_step(self._model_id, AdamParams(learning_rate=1e-6), "num_loss_tokens")


def count_parameters(folder: Path) -> int:
    """The model's; a tied head is not there a second time."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as tensors:
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118 - no mapping


def record(text: Text) -> DatumRecord:
    """The datum of a text, for the built-in policy loss at a ratio of about 1."""
    length, first = len(text.tokens) - 1, text.prompt_len - 1
    completion_tokens = np.arange(length) >= first
    inputs = {
        "target_tokens": encode(np.array(text.tokens[1:]), "int64"),
        "logprobs": encode(np.full(length, -math.log(51)), "float32"),
        "advantages": encode(np.where(completion_tokens, text.advantage, 0.0), "float32"),
        "weights": encode(completion_tokens.astype(np.float32), "float32"),
    }
    return DatumRecord.model_validate(
        {
            "model_input": {"chunks": [{"tokens": text.tokens[:-1]}]},
            "loss_fn_inputs": {name: value.as_dict() for name, value in inputs.items()},
        }
    )


class Calls:
    """Both ways of computing one loss, as a recipe calls them."""

    def __init__(self, client: FiretitanTrainingClient) -> None:
        self._client = client
        self._objective = GRPO(kl_beta=0.0)
        self._samples = [sample(text) for text in texts()]
        scored = client.forward([train_sample.datum for train_sample in self._samples]).result()
        for train_sample, output in zip(self._samples, scored.loss_fn_outputs, strict=True):
            train_sample.old_logprobs = output["logprobs"].data
        for _ in range(WARM_UP):
            self.pair(is_custom_first=True)

    def pair(self, *, is_custom_first: bool) -> CustomLoss:
        """One call of each.

        Raises:
            SystemExit: their gradients differ.
        """
        ways = {"custom": self._custom, "builtin": self._builtin}
        found: dict[str, tuple[float, float]] = {}
        norms: list[float] = []
        for name in ways if is_custom_first else reversed(ways):
            found[name] = timed(ways[name])
            norms.append(self._clear())
        if not math.isclose(*norms, rel_tol=TOLERANCE):
            raise SystemExit(f"gradient norms differ: {norms}")
        (custom_s, custom_cpu_s), (builtin_s, builtin_cpu_s) = found["custom"], found["builtin"]
        return CustomLoss(custom_s, builtin_s, custom_cpu_s, builtin_cpu_s)

    def _custom(self) -> None:
        samples = self._samples
        loss_fn = make_policy_loss_fn(
            "grpo",
            advantages=[sample.advantage for sample in samples],
            behavior_logprobs=[sample.behavior_logprobs for sample in samples],
            old_logprobs=[sample.old_logprobs or () for sample in samples],
            config=self._objective,
        )
        self._client.forward_backward_custom([sample.datum for sample in samples], loss_fn).result()

    def _builtin(self) -> None:
        loss_fn, data, options = BuiltinLoss("grpo", self._objective, None).request(self._samples)
        self._client.forward_backward(data, loss_fn, options).result()

    def _clear(self) -> float:
        """Drop the gradient; its norm."""
        adam = tinker.AdamParams(
            learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0
        )
        done = self._client.optim_step(adam, "num_loss_tokens").result()
        return (done.metrics or {})["grad_norm"]


def sample(text: Text) -> TrainSample:
    """What a recipe makes of a sampled text."""
    completion_tokens = len(text.tokens) - text.prompt_len
    rollout = RolloutSample(
        tokens=text.tokens,
        logprobs=[0.0] * text.prompt_len + [-math.log(51)] * completion_tokens,
        loss_mask=[0] * text.prompt_len + [1] * completion_tokens,
        reward=text.advantage,
    )
    return TrainSample.from_rollout(rollout, text.advantage)


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start_s, time.process_time() - start_cpu_s


def throughput(sizes: Sequence[str], rounds: int, steps: int) -> dict[str, list[Throughput]]:
    """Rounds of every size, in turn."""
    with ExitStack() as stack:
        trainers: dict[str, DirectTrainer] = {}
        for size in sizes:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            trainers[size] = DirectTrainer(size, folder)
            stack.callback(trainers[size].close)
        found: dict[str, list[Throughput]] = {size: [] for size in sizes}
        for number, size in itertools.product(range(rounds), sizes):
            result = trainers[size].round(steps)
            found[size].append(result)
            sys.stderr.write(f"round {number + 1}, {size}: {result}, share {result.share:.2f}\n")
        return found


def custom_loss(sizes: Sequence[str], rounds: int) -> dict[str, list[CustomLoss]]:
    """Pairs of calls of every size, each on a platform of its own."""
    found: dict[str, list[CustomLoss]] = {}
    for size in sizes:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            model = make_model(folder / "model", size, fixed_length=True)
            platform = stack.enter_context(EmbeddedPlatform(work_dir=folder / "platform"))
            trainers = TrainerJobManager("embedded", base_url=platform.base_url)
            stack.callback(trainers.close)
            cleanup = stack.enter_context(ResourceCleanup(trainers))
            infra = setup_infra(
                rlor_mgr=trainers,
                base_model=str(model),
                needs_inference=False,
                api_key="embedded",
                cleanup=cleanup,
            )
            stack.callback(infra.close)
            calls = Calls(infra.policy_client)
            found[size] = [calls.pair(is_custom_first=number % 2 == 0) for number in range(rounds)]
    return found


def throughput_table(found: Mapping[str, Sequence[Throughput]]) -> str:
    """Medians of the rounds."""
    lines = [
        "| model | trained tokens/s | computed tokens/s | GFLOP/s | sgemm GFLOP/s | share "
        "| lowest to highest share |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for size, results in found.items():

        def median(
            value: Callable[[Throughput], float], of: Sequence[Throughput] = results
        ) -> float:
            return statistics.median(map(value, of))

        shares = sorted(result.share for result in results)
        lines.append(
            f"| {size} | {median(lambda result: result.tokens_per_s):,.0f} "
            f"| {median(lambda result: result.computed_tokens_per_s):,.0f} "
            f"| {median(lambda result: result.gflops):.0f} "
            f"| {median(lambda result: max(result.sgemm_gflops_before_after)):.0f} "
            f"| {statistics.median(shares):.2f} | {shares[0]:.2f} to {shares[-1]:.2f} |"
        )
    return "\n".join(lines)


def custom_table(found: Mapping[str, Sequence[CustomLoss]]) -> str:
    """Medians of the pairs, and of their ratios."""
    lines = [
        "| model | custom s | built-in s | ratio | custom CPU s | built-in CPU s | ratio of CPU "
        "| its quartiles |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for size, pairs in found.items():
        walls = [pair.custom_s / pair.builtin_s for pair in pairs]
        cpus = [pair.custom_cpu_s / pair.builtin_cpu_s for pair in pairs]
        low, _, high = statistics.quantiles(cpus, n=4)
        seconds = [
            statistics.median(getattr(pair, name) for pair in pairs)
            for name in ("custom_s", "builtin_s", "custom_cpu_s", "builtin_cpu_s")
        ]
        lines.append(
            f"| {size} | {seconds[0]:.3f} | {seconds[1]:.3f} | {statistics.median(walls):.2f} "
            f"| {seconds[2]:.3f} | {seconds[3]:.3f} | {statistics.median(cpus):.2f} "
            f"| {low:.2f} to {high:.2f} |"
        )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["1m", "3m", "10m"], choices=list(SIZES))
    parser.add_argument("--custom", nargs="*", default=["1m", "3m"], choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="steps of a round")
    parser.add_argument("--pairs", type=int, default=24, help="calls of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    return parser.parse_args()


def command() -> None:
    """Measure and print."""
    asked = arguments()
    logging.disable(logging.WARNING)
    torch.set_num_threads(asked.threads)
    load = os.getloadavg()[0]
    speed = throughput(asked.models, asked.rounds, asked.steps)
    custom = custom_loss(asked.custom, asked.pairs)
    if asked.json:
        every: dict[str, Any] = {
            "load": load,
            "throughput": {
                size: [asdict(result) for result in found] for size, found in speed.items()
            },
            "custom_loss": {
                size: [asdict(result) for result in found] for size, found in custom.items()
            },
        }
        sys.stdout.write(json.dumps(every) + "\n")
        return
    sys.stdout.write(f"{processor()}, {asked.threads} threads, load {load:.1f} at the start\n")
    if speed:
        sys.stdout.write(f"\n{throughput_table(speed)}\n")
    if custom:
        sys.stdout.write(f"\n{custom_table(custom)}\n")


if __name__ == "__main__":
    command()
