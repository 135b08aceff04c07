"""What one device does with a model of real shape: rollouts, training, weight sync, a whole step.

Weights are random and made on the device; nothing is downloaded. Each part runs by itself: one that
fails (out of memory, say) is reported with its reason, and the others' results stand.

- *rollouts*: prompts of one length, completions of one length, all at once, through the embedded
  engine and through ``transformers``' ``generate`` on the same prompts. The *bound* is what a step
  must read (all weights but an untied embedding; keys and values of all rows at their mean length)
  over the device's measured copy bandwidth.
- *decode*: one step in the middle of those completions, launched kernel by kernel and replayed
  (CUDA graphs), and the sampling after it; what is left of the engine's step is the host's.
- *training*: a step on samples of one length. A token costs ``6 N + 6 L A D T`` operations: N
  parameters in matrix products (the head's among them, a looked-up embedding's not), and causal
  attention over L layers of A heads of size D at T tokens (arXiv:2204.02311, its attention halved).
  With an adapter it is ``4 N``: frozen weights get no gradient. What activation checkpointing
  computes twice counts once. MFU is that times tokens/s over the peak: the datasheet's, where the
  device's name is known, and that of a measured bfloat16 matrix product.
- *weight sync*: trainer to engine in one process, a base (of an adapter: the merged weights).
- *step*: rollouts of groups, training on them, weight sync, all on one device.

    python benchmarks/gpu.py --model 0.6b [--device cuda] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from machine import Machine, Times, best, clock, measure, peak_bytes, timed

from hearth.inference.backend import SampledSequence, SampleRequest, TokenListener
from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.engine import InferenceEngine
from hearth.inference.engine.graphs import CudaRecorder
from hearth.inference.engine.options import DecoderKind, EngineOptions
from hearth.inference.engine.runner import ModelRunner
from hearth.inference.engine.sampler import SamplingValues, sample
from hearth.models.loading import LoadedModel, best_device
from hearth.models.lora import LoraOptions
from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumRecord

logger = logging.getLogger(__name__)

Figures = dict[str, Any]

NAME = "random"
TRAINED_STEPS = 3
SYNCS = 3
GROUP = 8


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model's shape, and how much is done with it."""

    shape: dict[str, Any]
    rows: tuple[int, int] = (64, 256)
    prompt: int = 512
    new: int = 256
    lengths: tuple[int, int] = (2048, 16384)
    """Tokens of the samples that are trained on."""
    step_tokens: int = 32768
    """Tokens of a training step; 16384 of them in a pass."""
    lora_rank: int = 0
    """Where the optimizer of all parameters would not fit one device."""
    recompute_above: int | None = None
    copied: int = 2**30
    """Bytes of a copy, to measure the bandwidth."""
    product: int = 8192
    """Rows and columns of a matrix product, to measure the peak."""

    @property
    def layer_parameters(self) -> int:
        """All layers' matrices."""
        shape = self.shape
        heads = (2 * shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]) * shape[
            "head_dim"
        ]
        width = shape["num_hidden_layers"] * shape["hidden_size"]
        return width * (heads + 3 * shape["intermediate_size"])

    @property
    def head_parameters(self) -> int:
        """The head's matrix."""
        return self.shape["vocab_size"] * self.shape["hidden_size"]

    @property
    def num_bytes(self) -> int:
        """All weights in bfloat16, but for the norms."""
        tables = 1 if self.shape["tie_word_embeddings"] else 2
        return 2 * (self.layer_parameters + tables * self.head_parameters)

    def operations_per_token(self, length: int) -> float:
        """Of a forward and a backward pass over samples of ``length`` tokens; see above."""
        shape = self.shape
        products = self.layer_parameters + self.head_parameters
        heads = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
        return (4 if self.lora_rank else 6) * products + 6 * heads * length

    def bytes_of_a_step(self, rows: int) -> float:
        """What a decoding step reads at the completions' mean length, in bfloat16."""
        shape = self.shape
        per_token = (
            2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        )
        tokens = rows * (self.prompt + self.new / 2)
        return 2 * (self.layer_parameters + self.head_parameters + per_token * tokens)


QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
SETTINGS = {
    "0.6b": Setting(
        shape=QWEN3
        | {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
        }
    ),
    "8b": Setting(
        shape=QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "tie_word_embeddings": False,
        },
        lora_rank=32,
        recompute_above=4096,
    ),
    "tiny": Setting(
        shape=QWEN3
        | {
            "vocab_size": 512,
            "head_dim": 16,
            "num_key_value_heads": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "tie_word_embeddings": True,
        },
        rows=(4, 8),
        prompt=16,
        new=8,
        lengths=(32, 64),
        step_tokens=128,
        recompute_above=32,
        copied=2**20,
        product=128,
    ),
}


@dataclass(frozen=True)
class Trainer:
    """A trainer with its policy and its store."""

    engine: TrainerEngine
    model_id: str
    store: MemorySnapshotStore
    is_adapter: bool

    def optimize(self) -> None:
        """One optimizer step."""
        adam = AdamParams(learning_rate=1e-6)
        self.engine.optim_step(self.model_id, adam, "num_loss_tokens")

    def sync(self, served: InferenceEngine, identity: str, times: Times) -> None:
        """Have ``served`` serve the weights of now, an adapter's merged into its base.

        Raises:
            RuntimeError: it could not.
        """
        with times.of("save_s"):
            kind = "merged_base" if self.is_adapter else "base"
            self.engine.save_for_sampler(self.model_id, identity, kind)
        with times.of("load_s"):
            state = served.hot_load(identity, lambda: self.store.get(identity)).result()
        if state.error is not None:
            raise RuntimeError(state.error)


class Bench:
    """The parts, on one model and one device."""

    def __init__(self, setting: Setting, machine: Machine, folder: Path) -> None:
        self.setting = setting
        self.machine = machine
        self.device = machine.device
        self.folder = folder

    def parts(self) -> Iterator[tuple[str, Callable[[], Figures]]]:
        """Names and what measures them, the most wanted first."""
        few, many = self.setting.rows
        short, long = self.setting.lengths
        yield f"rollouts {few}", lambda: self.rollouts(few)
        yield f"rollouts {many}", lambda: self.rollouts(many)
        yield f"training {short}", lambda: self.training(short)
        yield f"training {long}", lambda: self.training(long)
        yield "weight sync", self.weight_sync
        yield f"decode {few}", lambda: self.decoding(few)
        yield f"decode {many}", lambda: self.decoding(many)
        yield f"generate {few}", lambda: self.generate(few)
        yield f"generate {many}", lambda: self.generate(many)
        yield "step", self.step

    def model(self) -> LoadedModel:
        """Random weights in bfloat16 that end no text; the same at each call."""
        import transformers

        config = transformers.Qwen3Config(
            **self.setting.shape, eos_token_id=None, bos_token_id=None, pad_token_id=0
        )
        torch.manual_seed(0)
        with torch.device(self.device):
            made: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        return LoadedModel(
            made.eval(),
            NAME,
            NAME,
            torch.bfloat16,
            self.device,
            (),
            config.vocab_size,
            config.max_position_embeddings,
        )

    def rollouts(self, rows: int) -> Figures:
        """The embedded engine; the first two samples record graphs and are not counted."""
        setting = self.setting
        with self._engine(rows) as engine:
            for seed in range(2):
                self._sample(engine, self._prompts(rows, seed), setting.new)
            times: list[float] = []
            # A token is there once the device has sent it; a prefill may only have been asked for.
            listener = TokenListener(lambda _: None, lambda _: times.append(time.perf_counter()))
            start_s = clock(self.device)
            self._sample(engine, self._prompts(rows, 2), setting.new, listener)
            total_s = clock(self.device) - start_s
        prefill_s = times[0] - start_s
        step_s = (total_s - prefill_s) / (setting.new - 1)
        bound_s = setting.bytes_of_a_step(rows) / self.machine.bytes_per_s
        return {
            "tokens_per_s": rows * setting.new / total_s,
            "prefill_s": prefill_s,
            "step_ms": 1e3 * step_s,
            "bound_step_ms": 1e3 * bound_s,
            "bound_tokens_per_s": rows / bound_s,
            "share_of_bound": bound_s / step_s,
        }

    def generate(self, rows: int) -> Figures:
        """``transformers`` on the same prompts, drawing from all tokens."""
        module: Any = self.model().module
        setting = self.setting
        prompts = torch.tensor(self._prompts(rows, 3), device=self.device)
        options = {
            "attention_mask": torch.ones_like(prompts),
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
        }

        def run(new: int) -> None:
            with torch.no_grad():
                completions = module.generate(prompts, max_new_tokens=new, **options)
            assert completions.shape == (rows, setting.prompt + new)

        run(2)
        total_s = timed(self.device, lambda: run(setting.new))
        return {"tokens_per_s": rows * setting.new / total_s}

    def decoding(self, rows: int) -> Figures:
        """Milliseconds of one step, eager and (on a GPU) replayed, and of the sampling after it."""
        loaded = self.model()
        found = self._decoding(loaded, rows, "eager_ms", decoder=None)
        found |= self._decoding(loaded, rows, "module_ms", decoder="module")
        if self.device.type == "cuda":
            recorder = CudaRecorder(self.device)
            found |= self._decoding(loaded, rows, "replayed_ms", decoder=None, recorder=recorder)
        return found

    def _decoding(
        self,
        loaded: LoadedModel,
        rows: int,
        name: str,
        *,
        decoder: DecoderKind | None,
        recorder: CudaRecorder | None = None,
    ) -> Figures:
        length = self.setting.prompt + self.setting.new
        runner = ModelRunner(loaded, max_seq_len=length, recorder=recorder, decoder=decoder)
        cache = SlotCache(runner.cache_shape, budget_bytes=2**62, max_slots=rows)
        cache.reserve(rows, length, active=0)
        # The engine's steps have no fewer.
        rows = cache.keys.shape[1]
        tokens = np.random.default_rng(0).integers(0, loaded.vocab_size, rows)
        positions = np.full(rows, self.setting.prompt + self.setting.new // 2)
        values = SamplingValues(np.ones(rows), np.ones(rows), np.zeros(rows, np.int64))
        seeds = np.arange(rows, dtype=np.uint64)
        # The first step runs eagerly, the second is recorded.
        logits = [runner.decode(tokens, positions, cache) for _ in range(3)][-1]
        step_s = best(self.device, lambda: runner.decode(tokens, positions, cache))
        draw_s = best(self.device, lambda: sample(logits, values, seeds, positions))
        return {name: 1e3 * step_s, "draw_ms": 1e3 * draw_s}

    def training(self, length: int) -> Figures:
        """Steps on samples of ``length`` tokens."""
        setting = self.setting
        data = [self._datum(length, seed) for seed in range(max(1, setting.step_tokens // length))]
        tokens = length * len(data)
        times = Times(self.device)
        with self._trainer(length) as trainer:
            for _ in range(1 + TRAINED_STEPS):
                with times.of("forward_s"):
                    trainer.engine.forward(trainer.model_id, data)
                with times.of("forward_backward_s"):
                    trainer.engine.forward_backward(trainer.model_id, data)
                with times.of("optim_s"):
                    trainer.optimize()
        seconds = times.medians()
        tokens_per_s = tokens / (seconds["forward_backward_s"] + seconds["optim_s"])
        operations = tokens_per_s * setting.operations_per_token(length)
        peaks = {"mfu": self.machine.datasheet, "mfu_of_measured": self.machine.operations_per_s}
        rank = setting.lora_rank
        return (
            {
                "tokens_per_s": tokens_per_s,
                "tokens": tokens,
                "trains": f"an adapter of rank {rank}" if rank else "all parameters",
                "recomputes": setting.recompute_above is not None,
                "tflops_per_s": operations / 1e12,
            }
            | seconds
            | {name: operations / peak for name, peak in peaks.items() if peak}
        )

    def weight_sync(self) -> Figures:
        """Seconds from trained weights to served ones."""
        length = self.setting.lengths[0]
        times = Times(self.device)
        with self._trainer(length) as trainer, self._engine(1) as engine:
            for number in range(1 + SYNCS):
                data = [self._datum(length, number)]
                trainer.engine.forward_backward(trainer.model_id, data)
                trainer.optimize()
                with times.of("sum_s"):
                    trainer.sync(engine, f"sync-{number}", times)
        return times.medians() | {"gib": self.setting.num_bytes / 2**30}

    def step(self) -> Figures:
        """Rollouts of groups, training on them with random advantages, weight sync."""
        setting = self.setting
        rows, length = setting.rows[0], setting.prompt + setting.new
        times = Times(self.device)
        with self._trainer(length) as trainer, self._engine(rows) as engine:
            for number in range(1 + TRAINED_STEPS):
                prompts = self._prompts(max(1, rows // GROUP), number)
                grouped = [prompts[index % len(prompts)] for index in range(rows)]
                with times.of("rollout_s"):
                    completions = self._sample(engine, grouped, setting.new)
                data = [
                    datum_of([*prompt, *completion.token_ids], setting.prompt, seed)
                    for seed, (prompt, completion) in enumerate(
                        zip(grouped, completions, strict=True)
                    )
                ]
                with times.of("forward_backward_s"):
                    trainer.engine.forward_backward(trainer.model_id, data)
                with times.of("optim_s"):
                    trainer.optimize()
                with times.of("sync_s"):
                    trainer.sync(engine, f"step-{number}", Times(self.device))
        seconds = times.medians()
        total_s = sum(seconds.values())
        shares = {f"{name[:-2]}_share": span_s / total_s for name, span_s in seconds.items()}
        return seconds | {"step_s": total_s, "samples_per_s": rows / total_s} | shares

    @contextlib.contextmanager
    def _engine(self, rows: int) -> Iterator[InferenceEngine]:
        length = self.setting.prompt + self.setting.new
        options = EngineOptions(max_seq_len=length, max_slots=rows)
        engine = InferenceEngine(self.model(), options=options)
        try:
            yield engine
        finally:
            engine.close()

    @contextlib.contextmanager
    def _trainer(self, length: int) -> Iterator[Trainer]:
        setting, store = self.setting, MemorySnapshotStore(1)
        random_model = self.model

        class RandomTrainer(TrainerEngine):
            def load_base(self) -> LoadedModel:
                return random_model()

        engine = RandomTrainer(
            NAME,
            snapshots=store,
            checkpoint_dir=self.folder,
            options=TrainerOptions(
                dtype="bfloat16",
                device=str(self.device),
                max_seq_len=length,
                micro_batch_tokens=setting.step_tokens // 2,
                recompute_above=setting.recompute_above,
            ),
        )
        try:
            lora = LoraOptions(rank=setting.lora_rank) if setting.lora_rank else None
            yield Trainer(engine, engine.create_model(lora), store, is_adapter=lora is not None)
        finally:
            engine.close()

    def _sample(
        self,
        engine: InferenceEngine,
        prompts: Sequence[list[int]],
        new: int,
        listener: TokenListener | None = None,
    ) -> list[SampledSequence]:
        """``listener`` hears of the last completion only, as its calls take time from a step."""
        requests = [
            SampleRequest(prompt=prompt, max_tokens=new, seed=seed, ignore_eos=True)
            for seed, prompt in enumerate(prompts)
        ]
        requests[-1] = replace(requests[-1], listener=listener)
        pending = [engine.submit(request) for request in requests]
        return [future.result() for future in pending]

    def _prompts(self, rows: int, seed: int) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        shape = (rows, self.setting.prompt)
        return rng.integers(0, self.setting.shape["vocab_size"], shape).tolist()

    def _datum(self, length: int, seed: int) -> DatumRecord:
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, self.setting.shape["vocab_size"], length + 1).tolist()
        return datum_of(tokens, 0, seed)


def datum_of(tokens: list[int], prompt: int, seed: int) -> DatumRecord:
    """Tokens with one random weight for all after the prompt."""
    weights = np.full(len(tokens) - 1, np.random.default_rng(seed).normal(), np.float32)
    weights[: max(0, prompt - 1)] = 0.0
    inputs = {
        "target_tokens": encode(np.asarray(tokens[1:]), "int64"),
        "weights": encode(weights, "float32"),
    }
    return DatumRecord.model_validate(
        {
            "model_input": {"chunks": [{"tokens": tokens[:-1]}]},
            "loss_fn_inputs": {name: value.as_dict() for name, value in inputs.items()},
        }
    )


def measured(run: Callable[[], Figures], device: torch.device) -> Figures:
    """A part's figures with its seconds and peak memory; why it failed, if it did."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start_s = time.perf_counter()
    try:
        found = run()
    except Exception as error:
        logger.debug("a part failed", exc_info=True)
        reason, *_ = str(error).splitlines() or [""]
        found: Figures = {"failed": f"{type(error).__name__}: {reason}"}
    found["seconds"] = time.perf_counter() - start_s
    found["peak_gib"] = peak_bytes(device) / 2**30
    # The next part needs all memory.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=list(SETTINGS), default="0.6b")
    parser.add_argument("--device", default=best_device())
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    parser.add_argument(
        "--budget-s", type=float, default=480.0, help="begin no part after so many seconds"
    )
    return parser.parse_args()


def command() -> None:
    """Measure and print."""
    asked = arguments()
    start_s = time.perf_counter()
    logging.basicConfig(level=logging.WARNING)
    device, setting = torch.device(asked.device), SETTINGS[asked.model]
    machine = measure(device, copied=setting.copied, size=setting.product)
    report: Figures = {
        "model": asked.model,
        "device": machine.name,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "setting": asdict(setting),
        "copy_gb_per_s": machine.bytes_per_s / 1e9,
        "product_tflops_per_s": machine.operations_per_s / 1e12,
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, run in Bench(setting, machine, Path(folder)).parts():
            if time.perf_counter() - start_s > asked.budget_s:
                report["parts"][name] = {"failed": f"not begun within {asked.budget_s:g} s"}
                continue
            report["parts"][name] = measured(run, device)
            sys.stderr.write(f"{name}: {report['parts'][name]}\n")
    report["against_generate"] = against_generate(report["parts"], setting)
    report["seconds"] = time.perf_counter() - start_s
    sys.stdout.write(orjson.dumps(report).decode() + "\n" if asked.json else text(report))


def against_generate(parts: Mapping[str, Figures], setting: Setting) -> Figures:
    """Tokens/s of the engine over those of ``generate``, by rows, where both are known."""
    key, found = "tokens_per_s", {}
    for rows in setting.rows:
        ours, theirs = parts[f"rollouts {rows}"], parts[f"generate {rows}"]
        if key in ours and key in theirs:
            found[str(rows)] = round(ours[key] / theirs[key], 3)
    return found


def text(report: Figures) -> str:
    """A report to read."""
    lines = [
        f"{name:>24}  {_shown(value)}"
        for name, value in report.items()
        if name not in ("parts", "setting")
    ]
    for part, figures in report["parts"].items():
        lines += ["", part, *(f"{name:>24}  {_shown(value)}" for name, value in figures.items())]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    command()
