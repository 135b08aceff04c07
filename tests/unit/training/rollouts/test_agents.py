"""Captured agents of a recipe, against a scripted deployment."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
from tests.unit.sdk.conftest import Answer, Peer, response
from tests.unit.training.platform_script import infra_of

from hearth.sdk import DeploymentSampler, FixedConcurrencyController
from training.recipes.async_rl_loop import Config, rollout_setup
from training.rollouts.agents import build_agent_server

CHOICE = {
    "index": 0,
    "message": {"role": "assistant", "content": "hi"},
    "finish_reason": "stop",
    "raw_output": {
        "prompt_token_ids": [1],
        "completion_token_ids": [5],
        "sampling_logprobs": [-0.25],
    },
}


@pytest.mark.slow
async def test_an_agents_requests_obey_the_runs_limit(tmp_path: Path) -> None:
    peer = Peer()
    peer.on("POST", "/inference/v1/chat/completions", Answer(response(CHOICE), delay_s=0.01))
    config = Config(log_path=str(tmp_path), max_concurrency_rollout_sample=2)
    limit = FixedConcurrencyController(config.max_concurrent)
    sampler = DeploymentSampler(peer.url, "model", "key", concurrency_controller=limit)
    policy = cast("Any", SimpleNamespace(supports_router_replay=False))
    infra = infra_of(policy, tmp_path, inference_url=peer.url, api_key="k", sampler=sampler)
    setup = rollout_setup(config, infra)

    with setup.closing, build_agent_server(setup).session() as session:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            asked: Any = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
            await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(16)))

    assert session.num_turns == len(peer.seen) == 16
    assert peer.most_in_flight == limit.high_water == 2
