"""The agent as a rollout function: one conversation through a captured session, and its reward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI, BadRequestError, DefaultAsyncHttpxClient

from training.data.rows import prompt_messages
from training.examples.rl.tool_use.agent import Outcome, Tool, solve
from training.examples.rl.tool_use.calculator import SCHEMA, calculator
from training.examples.rl.tool_use.reward import tool_use_reward
from training.rewards import marked_answer
from training.rollouts.agents import AgentSession, build_agent_server
from training.samples.rollout import RolloutFn, RolloutRun, RolloutSetup

TOOLS = {"calculator": Tool(SCHEMA, calculator)}


def make_rollout_fn(
    setup: RolloutSetup, on_outcome: Callable[[Outcome], object] = lambda outcome: None
) -> RolloutFn:
    """The rollout function for rows ``{"messages": [...], "ground_truth": "..."}``.

    ``on_outcome`` is told how each conversation ended, but for those that outgrew the context.
    """
    agents = build_agent_server(setup)

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutRun | None:
        messages = prompt_messages(sample_prompt)
        reward, parsed = 0.0, None
        with agents.session() as session:
            try:
                async with openai_client(session) as client:
                    outcome = await solve(client, messages, TOOLS)
                on_outcome(outcome)
                reward = tool_use_reward(outcome.answer, outcome.failed_calls, sample_prompt)
                parsed = marked_answer(outcome.answer) is not None
            except BadRequestError:
                # A conversation that has outgrown max_seq_len earns nothing; a first request that
                # is refused is none, but a mistake in the set-up.
                if session.num_turns == 0:
                    raise
        return session.run(reward=reward, parsed=parsed)

    return rollout_fn


def openai_client(session: AgentSession) -> AsyncOpenAI:
    """A client of the session, to be closed after it."""
    # The address is plain HTTP on this machine: no proxy stands before it, and reading the
    # certificates that are not needed would take longer than a whole conversation.
    http_client = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, http_client=http_client)
