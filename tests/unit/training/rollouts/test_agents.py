"""Captured agents of a recipe, against a scripted deployment."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import openai
import orjson
from tests.unit.training.platform_script import infra_of

from hearth.sdk import DeploymentSampler, FixedConcurrencyController
from hearth.sdk.transport import mount, unmount
from training.recipes.async_rl_loop import Config, rollout_setup
from training.rollouts.agents import build_agent_server

URL = "http://agents.test"
ANSWER = {
    "id": "c",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hi"},
            "finish_reason": "stop",
            "raw_output": {
                "prompt_token_ids": [1],
                "completion_token_ids": [5],
                "sampling_logprobs": [-0.25],
            },
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "weight_version": 4,
}


class Deployment:
    """Answers every request after a moment, and counts how many it has at once."""

    in_flight = most_in_flight = requests = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.requests += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.01)
        self.in_flight -= 1
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": orjson.dumps(ANSWER)})


async def test_an_agents_requests_obey_the_runs_limit(tmp_path: Path) -> None:
    config = Config(log_path=str(tmp_path), max_concurrency_rollout_sample=2)
    limit = FixedConcurrencyController(config.max_concurrent)
    sampler = DeploymentSampler(URL, "model", "key", concurrency_controller=limit)
    policy = cast("Any", SimpleNamespace(supports_router_replay=False))
    infra = infra_of(policy, tmp_path, inference_url=URL, api_key="k", sampler=sampler)
    setup = rollout_setup(config, infra)
    deployment = Deployment()
    mount(URL, deployment)

    with setup.closing, build_agent_server(setup).session() as session:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            asked: Any = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
            await asyncio.gather(*(client.chat.completions.create(**asked) for _ in range(16)))

    unmount(URL)
    assert session.num_turns == deployment.requests == 16
    assert deployment.most_in_flight == limit.high_water == 2
