"""One completion for each call, of a prompt that is token ids already: nothing is rendered here."""

from __future__ import annotations

from typing import Any

from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.rewards import answer_reward
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """The rollout function for rows ``{"prompt_token_ids": [...], "ground_truth": "..."}``."""
    sampler = build_deployment_sampler(setup)
    sample_kwargs = dict(setup.sample_kwargs)

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutSample | None:
        completions = await sampler.sample_with_prompt_tokens(
            sample_prompt["prompt_token_ids"], n=1, **sample_kwargs
        )
        if not completions:  # prompt and completion do not fit into max_seq_len
            return None
        c = completions[0]
        output = list(c.full_tokens)[c.prompt_len :]
        score = answer_reward.score(c.text, sample_prompt)
        return RolloutSample(
            tokens=list(c.full_tokens),
            logprobs=[0.0] * c.prompt_len + list(c.inference_logprobs or []),
            loss_mask=[0] * c.prompt_len + [1] * len(output),
            reward=score.reward,
            finish_reason=c.finish_reason,
            text=c.text,
            parsed=score.parsed,
        )

    return rollout_fn
