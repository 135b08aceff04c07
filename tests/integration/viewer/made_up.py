"""Folders of runs that nobody trained, with known numbers and texts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hearth.records.layout import SAMPLES, TIMELINE, VOCABULARY, Kind, name_file
from hearth.records.table import make_table, write_samples, write_vocabulary
from hearth.records.timeline import describe_process

START = "<|im_start|>"
END = "<|im_end|>"
SPECIALS = (START, END)
VOCABULARY_BYTES = [*(name.encode() for name in SPECIALS), *(bytes([byte]) for byte in range(256))]
BEGAN = 1_790_000_000.0
"""Unix time at which made-up runs begin."""
STEP_S = 2.0
COMPLETIONS = 4
GROUPS = 2

SCRIPT = "<script>window.PWNED = 1</script><img src=x onerror='window.PWNED = 1'>"
HOSTILE_TEXTS = (
    SCRIPT,
    "\x1b[31mred\x1b[0m \x07 bell \x00 nul",
    "abc \u202e reversed \u202c \u2066 isolated \u200b zero",
    "Z" + "\u0489" * 500 + "algo",
    "مرحبا mixed with עברית",
    "x" * 10_000_000,
    "first\r\nsecond\ttabbed\n\n\n  indented",
    "javascript:alert(1) \ufeff \ud7ff \U000e0041",
)


def encode(text: str) -> list[int]:
    """Ids of the made-up vocabulary: special tokens, and single bytes."""
    ids: list[int] = []
    while text:
        special = next((name for name in SPECIALS if text.startswith(name)), None)
        if special is not None:
            ids.append(SPECIALS.index(special))
            text = text[len(special) :]
            continue
        cut = min((text.find(name) for name in SPECIALS if name in text), default=len(text))
        ids += [byte + len(SPECIALS) for byte in text[:cut].encode("utf-8", "surrogatepass")]
        text = text[cut:]
    return ids


def make_sample(kind: Kind, step: int, index: int, completion: int, text: str) -> dict[str, Any]:
    """One sample by column: a question, its answer, and values that follow from the place."""
    prompt = f"{START}user\nWhat is {index} + {step}?{END}\n{START}assistant\n"
    given, sampled = encode(prompt), encode(text[:40_000] + END)
    count, first = len(given) + len(sampled), len(given)
    right = (completion + step) % 3 == 0
    outcome = "evaluated" if kind == "eval" else "trained" if index % GROUPS == 0 else "stale"

    def by_token(value: float, empty: float = math.nan) -> list[float]:
        return [empty] * first + [value] * (count - first)

    return {
        "run": "made-up",
        "kind": kind,
        "step": step,
        "index": index,
        "row": index % 6,
        "epoch": index // 6,
        "completion": completion,
        "segment": 0,
        "tokens": given + sampled,
        "prompt_len": first,
        "loss_mask": [place >= first for place in range(count)],
        "behavior_logprobs": by_token(-0.25 * (completion + 1)),
        "policy_logprobs": by_token(-0.25 * (completion + 1) + 0.01),
        "ratios": by_token(math.exp(0.01)),
        "clipped": [place == first + 1 for place in range(count)],
        "versions": [int(value) for value in by_token(step - 1, -1)],
        "version": step - 1,
        "advantage": (1.0 if right else -0.5) if outcome == "trained" else None,
        "reward": float(right),
        "reward_parts": [("correct", float(right)), ("form", 0.5)],
        "parsed": True,
        "outcome": outcome,
        "reason": "3 versions late, at most 1" if outcome == "stale" else None,
        "finish_reason": "stop",
        "text": text,
        "prompt": prompt,
        "ground_truth": str(index + step),
        "seeds": [1000 * step + completion],
        "turns": 1,
        "tool_calls": 0,
        "started": BEGAN + STEP_S * step,
        "sample_s": 0.5,
        "score_s": 0.01,
        "metadata": json.dumps({"difficulty": "easy"}),
        "length": len(sampled),
        "mean_logprob": -0.25 * (completion + 1),
    }


def write_file(folder: Path, kind: Kind, step: int, samples: list[dict[str, Any]]) -> None:
    """Write the file of one step's samples."""
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    write_samples(folder / SAMPLES / name_file(kind, step), [make_table(columns)], "made-up")


def append(path: Path, *entries: dict[str, Any]) -> None:
    """Append lines of JSON."""
    with path.open("a") as file:
        file.writelines(json.dumps(entry) + "\n" for entry in entries)


def append_step(folder: Path, step: int, shift: float = 0.0) -> None:
    """What a run writes about a step: its samples, its times, then its line of metrics."""
    samples = [
        make_sample("train", step, index, completion, answer(step, index, completion, shift))
        for index in range(GROUPS * (step - 1), GROUPS * step)
        for completion in range(COMPLETIONS)
    ]
    write_file(folder, "train", step, samples)
    at = BEGAN + STEP_S * step
    spans = (("sampler", "sample", 0.0, 1.0), ("trainer", "wait", 0.0, 1.0))
    spans += (("trainer", "forward_backward", 1.0, 1.6), ("sync", "weight_sync", 1.7, 1.9))
    append(
        folder / TIMELINE,
        *(
            {
                "type": "span",
                "step": step,
                "lane": lane,
                "name": name,
                "start": at + start,
                "end": at + end,
                "version": step - 1,
            }
            for lane, name, start, end in spans
        ),
        {
            "type": "event",
            "time": at + 1.9,
            "step": step,
            "name": "weight_sync",
            "text": f"version {step}",
        },
    )
    metrics = {
        "rollout/raw_reward": 0.05 * step + shift,
        "rollout/reward": 0.05 * step + shift,
        "rollout/entropy": 1.0 / step,
        "train/grad_norm": 1.0 + 0.1 * step,
        "perf/step_wall_time": STEP_S,
    }
    append(folder / "metrics.jsonl", {"type": "train", "step": step, **metrics})


def answer(step: int, index: int, completion: int, shift: float) -> str:
    """The text of a sample; runs with different shifts part at step 5."""
    changed = " indeed" if shift and step >= 5 else ""
    return f"The sum of {index} and {step} is {index + step + completion}{changed}."


def begin(folder: Path, **settings: Any) -> None:
    """Write what a run writes before its first step, as if this process were the run."""
    (folder / SAMPLES).mkdir(parents=True)
    config = {"log_path": str(folder), "base_model": "made/up", "policy_loss": "grpo", "seed": 0}
    (folder / "config.json").write_text(json.dumps(config | settings))
    specials = set(range(len(SPECIALS)))
    write_vocabulary(folder / SAMPLES / VOCABULARY, [*VOCABULARY_BYTES], specials, "made-up")
    start = {
        "type": "event",
        "time": BEGAN,
        "step": 0,
        "name": "start",
        "text": "",
        "run": "made-up",
    }
    append(folder / TIMELINE, start | {"recipe": "rl_loop"} | describe_process())


def end(folder: Path, step: int) -> None:
    """Write that the run ended by itself."""
    time = BEGAN + STEP_S * (step + 1)
    append(
        folder / TIMELINE, {"type": "event", "time": time, "step": step, "name": "end", "text": ""}
    )


def write_run(folder: Path, steps: int = 12, shift: float = 0.0, **settings: Any) -> None:
    """A run that ended after ``steps``, with an evaluation every four."""
    begin(folder, **settings)
    for step in range(1, steps + 1):
        append_step(folder, step, shift)
        if step % 4 == 0:
            samples = [make_sample("eval", step, index, 0, "held-out") for index in range(3)]
            write_file(folder, "eval", step, samples)
            record = {
                "type": "eval",
                "step": step,
                "eval/accuracy": 0.07 * step,
                "eval/reward": 0.5,
            }
            append(folder / "metrics.jsonl", record)
    end(folder, steps)


def write_hostile_run(folder: Path) -> None:
    """A run whose model, dataset and settings attack whoever reads them."""
    begin(folder, policy_loss=SCRIPT, dataset="\u202egnp.elif")
    samples = [make_sample("train", 1, 0, place, text) for place, text in enumerate(HOSTILE_TEXTS)]
    for sample in samples:
        sample |= {
            "ground_truth": SCRIPT,
            "metadata": SCRIPT,
            "reason": SCRIPT,
            "outcome": "failed",
        }
    samples[1]["reward"] = math.nan
    long = make_sample("train", 1, 2, 0, "Ten words or so are said here. \n" * 1_150)
    nothing = make_sample("train", 1, 4, 0, "") | {"reason": "the sampler was gone", "length": 0}
    nothing |= {"tokens": [], "loss_mask": [], "versions": [], "seeds": [], "prompt_len": 0}
    for name in ("behavior_logprobs", "policy_logprobs", "ratios", "clipped"):
        nothing[name] = None
    write_file(folder, "train", 1, [*samples, long, nothing])
    record = {"type": "train", "step": 1, "rollout/reward": math.nan, SCRIPT: 1.0}
    append(folder / "metrics.jsonl", record)
    warning = {"type": "event", "time": BEGAN, "step": 1, "name": "warning", "text": SCRIPT}
    append(folder / TIMELINE, warning)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"type":"train","step":2,"rollout/rew')
    end(folder, 1)
