"""GRPO without a recipe: managers, ``setup_infra``, a sampler, a loss of one's own, weight sync.

    python docs/examples/own_loop.py

trains the shipped tiny model for a few steps, on a platform inside this process. With
HEARTH_URL and HEARTH_API_KEY set, the same lines train on the platform that is served
there. docs/your_own_loop.md explains the parts.
"""
# ruff: noqa: T201 - a program says what it does

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tinker
import torch
import transformers

from hearth.local import EmbeddedPlatform
from hearth.sdk import DeploymentManager, DeploymentSampler, TrainerJobManager, WeightSyncer
from training.data.rows import load_rows
from training.quickstart import MODEL, TRAIN_ROWS
from training.rewards import answer_reward
from training.utils import DeployConfig, ResourceCleanup
from training.utils.rl import Infra, build_grpo_datums, group_advantages, setup_infra

BASE_MODEL, STEPS, ROWS_PER_STEP, GROUP, KL_BETA = str(MODEL), 4, 8, 8, 0.01
ADAM = tinker.AdamParams(
    learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0
)


@contextlib.contextmanager
def platform() -> Iterator[tuple[str, str]]:
    """URL and key of the served platform, or of one inside this process."""
    if url := os.environ.get("HEARTH_URL"):
        yield url, os.environ["HEARTH_API_KEY"]
        return
    with EmbeddedPlatform(work_dir=Path(tempfile.mkdtemp(prefix="own-loop-"))) as embedded:
        yield embedded.base_url, "embedded"


async def draw(sampler: DeploymentSampler, rows: list[dict[str, Any]]) -> list[list[Any]]:
    """The completions of several rows, all of them in flight at once."""
    calls = [sampler.sample_with_tokens(row["messages"], n=GROUP, max_tokens=16) for row in rows]
    return list(await asyncio.gather(*calls))


def grpo_loss(advantages: list[float], ref_logprobs: list[torch.Tensor]) -> Any:
    """REINFORCE with a KL to the reference (k3). A sum: ``optim_step`` divides it, once."""

    def loss_fn(data: list[tinker.Datum], logprobs: list[torch.Tensor]) -> Any:
        policy, kl = [], []
        for datum, row, advantage, ref in zip(
            data, logprobs, advantages, ref_logprobs, strict=True
        ):
            mask = datum.loss_fn_inputs["weights"].to_torch()  # 0 on the prompt, 1 behind it
            policy.append(-(advantage * row * mask).sum())
            kl.append((((ref - row).exp() - (ref - row) - 1) * mask).sum())
        total_kl = torch.stack(kl).sum()
        return torch.stack(policy).sum() + KL_BETA * total_kl, {"kl:sum": total_kl.item()}

    return loss_fn


def train_step(infra: Infra, groups: list[list[Any]], scores: list[list[float]]) -> bool:
    """One optimizer step; False when no group has spread, and so nothing was taught."""
    assert infra.reference is not None, "asked for with needs_reference"
    taught = [pair for pair in zip(groups, scores, strict=True) if max(pair[1]) > min(pair[1])]
    datums = build_grpo_datums([one for group, _ in taught for one in group])
    advantages = [value for _, score in taught for value in group_advantages(score)]
    if not datums:
        return False
    scored = infra.reference.forward(datums).loss_fn_outputs
    refs = [one["logprobs"].to_torch() for one in scored]
    result = infra.policy.forward_backward_custom(datums, grpo_loss(advantages, refs))
    infra.policy.optim_step(ADAM, "num_loss_tokens")
    print(f"  {len(taught)} groups, KL {result.metrics['kl:sum']:.3f}")
    return True


def main() -> list[float]:
    """Train, save and promote; returns the mean reward of every step."""
    rows = load_rows(str(TRAIN_ROWS), STEPS * ROWS_PER_STEP)
    means: list[float] = []
    with platform() as (base_url, api_key), contextlib.ExitStack() as stack:
        trainers = TrainerJobManager(api_key, base_url=base_url)
        deployments = DeploymentManager(api_key, base_url=base_url)
        cleanup = stack.enter_context(ResourceCleanup(trainers, deployments))
        infra = setup_infra(
            rlor_mgr=trainers,
            deploy_mgr=deployments,
            base_model=BASE_MODEL,
            api_key=api_key,
            deploy_cfg=DeployConfig(tokenizer_model=BASE_MODEL),
            max_seq_len=128,
            needs_reference=True,
            needs_inference=True,
            role_prefix="own-loop",
            cleanup=cleanup,
        )
        deployment_id = str(infra.deployment_id)
        cleanup.deployment(deployment_id, "delete")
        tokenizer = transformers.AutoTokenizer.from_pretrained(BASE_MODEL)
        inference_model = str(infra.inference_model)
        sampler = DeploymentSampler(deployments.inference_url, inference_model, api_key, tokenizer)
        syncer = WeightSyncer(infra.policy_client, deployments, deployment_id, BASE_MODEL)

        for step in range(1, STEPS + 1):
            batch = rows[(step - 1) * ROWS_PER_STEP : step * ROWS_PER_STEP]
            groups = asyncio.run(draw(sampler, batch))
            scores = [
                [answer_reward(one.text, row) for one in group]
                for group, row in zip(groups, batch, strict=True)
            ]
            means.append(sum(map(sum, scores)) / (GROUP * len(batch)))
            print(f"step {step}: reward {means[-1]:.3f}")
            if train_step(infra, groups, scores):
                syncer.save_and_hotload(f"step-{step:05d}")
                infra.policy.save_state(f"step-{step:05d}", metadata={"rows": step * ROWS_PER_STEP})

        final = syncer.save_only("final", "base")
        made = trainers.promote_checkpoint(infra.policy_job_id, final, "own-loop", BASE_MODEL)
        print(f"the trained model is {made.name}, in {made.source}")
        sampler.close()
    return means


if __name__ == "__main__":
    main()
