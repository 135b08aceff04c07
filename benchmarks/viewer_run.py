"""A made-up run for the viewer: as many samples, tokens and steps as asked for, in files like a
recipe's. Its texts are random words; nothing was trained."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hearth.records.layout import SAMPLES, TIMELINE, VOCABULARY, name_file
from hearth.records.table import make_table, write_samples, write_vocabulary

GROUPS_PER_STEP = 5
COMPLETIONS = 10
MERGED_STEPS = 64
ROWS = 2000
PROMPT_WORDS = 40
EVAL_EVERY = 100
EVAL_ROWS = 20
STEP_S = 3.0
START = 1_760_000_000.0
_MARKS = (b"<|im_start|>", b"<|im_end|>", b"<|endoftext|>")
_WORDS = 8000


def make_run(folder: Path, *, steps: int, tokens: int, long_tokens: int, seed: int = 0) -> None:
    """Write a run of ``steps`` steps of 50 samples of ``tokens`` sampled tokens into ``folder``.

    Step 1 has one more, of ``long_tokens`` tokens in all. Nothing is written where the folder holds
    a whole run.
    """
    done = folder / "made.json"
    made = {"steps": steps, "tokens": tokens, "long_tokens": long_tokens, "seed": seed}
    if done.exists() and json.loads(done.read_text()) == made:
        return
    samples = folder / SAMPLES
    samples.mkdir(parents=True, exist_ok=True)
    for old in samples.glob("*.parquet"):
        old.unlink()
    maker = _Maker(steps, tokens, long_tokens, seed)
    write_vocabulary(samples / VOCABULARY, list(maker.vocabulary), {0, 1, 2}, maker.run)
    for first in range(1, steps + 1, MERGED_STEPS):
        last = first + MERGED_STEPS - 1
        if last <= steps:
            tables = (make_table(maker.step(step)) for step in range(first, last + 1))
            write_samples(samples / name_file("train", first, last), tables, maker.run)
        else:
            for step in range(first, steps + 1):
                table = make_table(maker.step(step))
                write_samples(samples / name_file("train", step), [table], maker.run)
    for step in range(0, steps + 1, EVAL_EVERY):
        table = make_table(maker.evaluation(step))
        write_samples(samples / name_file("eval", step), [table], maker.run)
    _write_lines(folder / "metrics.jsonl", maker.metrics())
    _write_lines(folder / TIMELINE, maker.timeline())
    settings = maker.config(str(folder))
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    (folder / "trained_on.json").write_text(json.dumps({"num_rows": ROWS}))
    done.write_text(json.dumps(made))


class _Maker:
    def __init__(self, steps: int, tokens: int, long_tokens: int, seed: int) -> None:
        self.steps, self.tokens, self.long_tokens, self.seed = steps, tokens, long_tokens, seed
        self.run = f"made-up-{seed}"
        self._random = np.random.default_rng(seed)
        self.vocabulary = _make_vocabulary(self._random)
        self._special = len(_MARKS)
        self._prompts = self._random.integers(
            self._special, len(self.vocabulary) - 4, (ROWS, PROMPT_WORDS)
        )
        self._rewards: dict[int, float] = {}

    def step(self, step: int) -> dict[str, list[Any]]:
        """The columns of a step's samples."""
        share = self._skill(step)
        lines: list[dict[str, Any]] = []
        for group in range(GROUPS_PER_STEP):
            index = (step - 1) * GROUPS_PER_STEP + group
            rewards = (self._random.random(COMPLETIONS) < share).astype(float)
            spread = rewards.std()
            outcome = "trained" if spread else "uniform"
            for completion in range(COMPLETIONS):
                line = self._sample("train", step, index, completion, self.tokens)
                advantage = (rewards[completion] - rewards.mean()) / spread if spread else 0.0
                line |= {"reward": rewards[completion], "advantage": advantage, "outcome": outcome}
                line["reason"] = None if spread else "all completions earned the same reward"
                lines.append(line)
        self._rewards[step] = float(np.mean([line["reward"] for line in lines]))
        if step == 1 and self.long_tokens:
            long = self._sample("train", 1, GROUPS_PER_STEP * self.steps, 0, self.long_tokens)
            lines.append(long | {"reward": 1.0, "advantage": 0.5, "outcome": "trained"})
        return _to_columns(lines)

    def evaluation(self, step: int) -> dict[str, list[Any]]:
        """The columns of an evaluation's samples."""
        share = self._skill(step)
        lines = []
        for row in range(EVAL_ROWS):
            line = self._sample("eval", step, row, 0, self.tokens)
            reward = float(self._random.random() < share)
            lines.append(line | {"row": row, "reward": reward, "outcome": "evaluated"})
        return _to_columns(lines)

    def _skill(self, step: int) -> float:
        return 0.15 + 0.8 * (1 - math.exp(-3 * step / self.steps))

    def _sample(
        self, kind: str, step: int, index: int, completion: int, count: int
    ) -> dict[str, Any]:
        row = index % ROWS
        head = [0, self._special, self._special + 2, *self._prompts[row], 1]
        head += [self._special + 2, 0, self._special + 1, self._special + 2]
        draws = self._random.zipf(1.3, count - 1) % (len(self.vocabulary) - self._special - 3)
        completed = np.concatenate([draws + self._special + 3, [1]])
        ids = np.concatenate([head, completed]).astype(np.int32)
        mask = np.zeros(len(ids), bool)
        mask[len(head) :] = True
        logprobs = np.where(mask, -self._random.exponential(0.6, len(ids)), np.nan)
        logprobs = logprobs.astype(np.float32)
        gap = self._random.normal(0, 1e-3, len(ids)).astype(np.float32)
        clipped = mask & (self._random.random(len(ids)) < 0.01)
        versions = np.where(mask, max(0, step - 1), -1).astype(np.int32)
        words = [self.vocabulary[number] for number in completed[:-1]]
        started = START + (step - 1) * STEP_S + 0.2 * self._random.random()
        return {
            "run": self.run,
            "kind": kind,
            "step": step,
            "index": index,
            "row": row,
            "epoch": index // ROWS,
            "completion": completion,
            "segment": 0,
            "tokens": ids,
            "prompt_len": len(head),
            "loss_mask": mask,
            "behavior_logprobs": logprobs,
            "policy_logprobs": logprobs + gap if kind == "train" else None,
            "ratios": np.exp(gap) if kind == "train" else None,
            "clipped": clipped if kind == "train" else None,
            "versions": versions,
            "version": max(0, step - 1),
            "reward_parts": [("answer", 1.0), ("form", 0.5)],
            "parsed": completion % 7 != 0,
            "finish_reason": "length" if completion % 11 == 10 else "stop",
            "text": b"".join(words).decode(errors="replace"),
            "prompt": b"".join(self.vocabulary[number] for number in head).decode(),
            "ground_truth": str(row),
            "seeds": [int(self._random.integers(2**62))],
            "turns": 1,
            "tool_calls": 0,
            "started": started,
            "sample_s": 1.5 * self._random.random() + 0.2,
            "score_s": 0.001,
            "length": count,
            "mean_logprob": float(np.nanmean(logprobs)),
        }

    def metrics(self) -> Iterator[dict[str, Any]]:
        """The records of ``metrics.jsonl``."""
        noise = np.random.default_rng(self.seed + 1)
        for step in range(self.steps + 1):
            if step:
                wave = [float(value) for value in noise.normal(0, 1, 60)]
                yield {
                    "type": "train",
                    "step": step,
                    "rollout/raw_reward": self._rewards[step],
                    "rollout/reward": self._rewards[step],
                    "rollout/total_sampled": float(GROUPS_PER_STEP),
                    "rollout/entropy": 1.2 * math.exp(-2 * step / self.steps) + 0.02 * wave[0],
                    "rollout/response_len/mean": float(self.tokens),
                    "rollout/truncated_ratio": abs(0.01 * wave[1]),
                    "signal/useful_row_ratio": 0.8,
                    "train/ref_kl": 0.05 * step / self.steps,
                    "train/grad_norm": abs(0.5 + 0.1 * wave[2]),
                    "train/ppo_clip_frac": abs(0.01 * wave[3]),
                    "parity/p95": abs(1e-3 * wave[4]),
                    "version/sample_staleness_mean": 0.0,
                    **{f"made/{number}": value for number, value in enumerate(wave)},
                    "perf/rollout_samples_per_s": 50 / STEP_S,
                    "perf/step_wall_time": STEP_S,
                }
            if step % EVAL_EVERY == 0:
                share = self._skill(step)
                yield {"type": "eval", "step": step, "eval/accuracy": share, "eval/reward": share}

    def timeline(self) -> Iterator[dict[str, Any]]:
        """The spans and events of ``timeline.jsonl``."""
        yield {
            "type": "event",
            "time": START,
            "step": 0,
            "name": "start",
            "text": "",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot_id": "made up",
            "recipe": "rl_loop",
            "run": self.run,
            "changed": {"prompt_groups_per_step": [8, GROUPS_PER_STEP]},
        }
        phases = (
            ("sampler", "sample", 0.0, 1.9),
            ("loop", "wait", 0.0, 1.9),
            ("trainer", "forward_backward", 1.9, 2.6),
            ("trainer", "optim_step", 2.6, 2.7),
            ("sync", "weight_sync", 2.7, 2.95),
        )
        for step in range(1, self.steps + 1):
            at = START + (step - 1) * STEP_S
            for lane, name, start, end in phases:
                span = {"type": "span", "step": step, "lane": lane, "name": name}
                version = step if name == "weight_sync" else step - 1
                yield {**span, "start": at + start, "end": at + end, "version": version}
            if step % EVAL_EVERY == 0:
                yield _event(at + STEP_S, step, "checkpoint", f"step-{step:05d}")
        end = START + self.steps * STEP_S
        yield _event(end, self.steps, "end", f"{self.steps} steps")

    def config(self, log_path: str) -> dict[str, Any]:
        """The run's settings."""
        return {
            "log_path": log_path,
            "base_model": "made-up",
            "policy_loss": "grpo",
            "epochs": 5,
            "seed": self.seed,
            "temperature": 1.0,
            "completions_per_prompt": COMPLETIONS,
            "prompt_groups_per_step": GROUPS_PER_STEP,
            "max_completion_tokens": self.tokens,
            "trainer": {"dtype": "float32", "ranks": 1},
        }


def _event(at: float, step: int, name: str, text: str) -> dict[str, Any]:
    return {"type": "event", "time": at, "step": step, "name": name, "text": text}


def _make_vocabulary(random: np.random.Generator) -> list[bytes]:
    """Marks, the words of roles, made-up words of two to six letters, and a character in parts."""
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words: dict[bytes, None] = {}
    while len(words) < _WORDS:
        size = int(random.integers(2, 7))
        words[(" " + "".join(letters[random.zipf(1.2, size) % 26])).encode()] = None
    smile = "\U0001f600".encode()
    return [*_MARKS, b"user", b"assistant", b"\n", *words, smile, smile[:2], smile[2:], b"\n\n"]


def _to_columns(lines: list[dict[str, Any]]) -> dict[str, list[Any]]:
    names = list(dict.fromkeys(name for line in lines for name in line))
    return {name: [line.get(name) for line in lines] for name in names}


def _write_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
