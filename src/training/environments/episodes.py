"""Episodes as rollouts: the policy answers, the environment goes on, until the episode is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hearth.errors import RequestError
from training.environments.calls import EnvironmentCalls
from training.environments.protocol import Environment, Step, check_step, read_observation
from training.environments.tools import run_tool, tool_schemas
from training.rollouts.agents import AgentServer, AgentSession, build_agent_server
from training.rollouts.failures import DroppedRolloutError, is_recoverable
from training.rollouts.sampler import RolloutSampler, build_deployment_sampler
from training.samples.groups import completion_sample
from training.samples.rollout import RolloutFn, RolloutRun, RolloutSetup

MakeEnvironment = Callable[[], Environment]


def is_single_turn(environment: Environment) -> bool:
    """Whether an episode is one answer and no more."""
    return environment.max_turns == 1 and not environment.tools


def episode_rollouts(make: MakeEnvironment, timeout_s: float, setup: RolloutSetup) -> RolloutFn:
    """The rollout function that plays one episode of ``row["seed"]``.

    What the environment fails with is tried again where it may pass, as a lost connection; else the
    rollout is dropped.
    """
    players = _Players(EnvironmentCalls(timeout_s), setup)

    async def rollout_fn(row: dict[str, Any]) -> RolloutRun | None:
        environment = None
        try:
            environment, told = await players.calls.begin(make, row["seed"])
            player = players.answer_once if is_single_turn(environment) else players.converse
            run = await player(environment, told)
            if run is not None:
                truth = environment.ground_truth
                run.run_id = ""  # a session's is another each time; the seed says more
                run.metadata = {"seed": row["seed"]} | ({"ground_truth": truth} if truth else {})
            return run
        except DroppedRolloutError as error:
            if error.__cause__ is not None and is_recoverable(error.__cause__):
                raise error.__cause__ from None
            raise
        finally:
            if environment is not None:
                await players.calls.close(environment)

    return rollout_fn


@dataclass
class _Players:
    """Who samples an episode's answers. What is not needed is not opened."""

    calls: EnvironmentCalls
    setup: RolloutSetup
    sampler: RolloutSampler | None = None
    agents: AgentServer | None = None

    async def answer_once(self, environment: Environment, told: list[dict[str, Any]]) -> RolloutRun:
        """One answer, sampled as ``rl_loop`` samples it, to the token."""
        if self.sampler is None:
            self.sampler = build_deployment_sampler(self.setup)
        completions = await self.sampler.sample_with_tokens(told, n=1, **self.setup.sample_kwargs)
        if not completions:
            raise DroppedRolloutError("reset must leave room below max_seq_len, got a longer text")
        (completion,) = completions
        step = await take_step(self.calls, environment, completion.text)
        sample = completion_sample(
            completion, float(step.reward), parsed=step.parsed, parts=step.parts
        )
        return RolloutRun([sample])

    async def converse(
        self, environment: Environment, told: list[dict[str, Any]]
    ) -> RolloutRun | None:
        """Turns and tool calls, captured token by token."""
        if self.agents is None:
            self.agents = build_agent_server(self.setup)
        with self.agents.session() as session:
            earned = await _play(self.calls, environment, session, told)
        return session.run(earned.reward, parsed=earned.parsed, parts=earned.parts or None)


@dataclass
class Earned:
    """What the steps of an episode have earned together."""

    reward: float = 0.0
    parsed: bool | None = None
    """Of the last step that says so."""
    parts: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, step: Step) -> None:
        """Count one step."""
        self.reward += float(step.reward)
        self.parsed = self.parsed if step.parsed is None else step.parsed
        for name, value in (step.parts or {}).items():
            self.parts[name] = self.parts.get(name, 0.0) + float(value)


async def take_step(calls: EnvironmentCalls, environment: Environment, answer: str) -> Step:
    """The environment's step after an answer.

    Raises:
        DroppedRolloutError: it failed, took too long, or gave no step.
    """
    return check_step(await calls.call(environment.step, answer))


async def _play(
    calls: EnvironmentCalls,
    environment: Environment,
    session: AgentSession,
    messages: list[dict[str, Any]],
) -> Earned:
    """Play an episode. One whose conversation outgrows the context ends there, with what it has
    earned.

    Raises:
        DroppedRolloutError: the environment failed.
    """
    earned, schemas = Earned(), tool_schemas(environment.tools)
    for turn in range(environment.max_turns):
        message = await _sample(session, messages, schemas)
        if message is None:
            break
        finish_reason = message.pop("finish_reason")
        messages.append(message)
        if finish_reason == "tool_calls":
            for call in message["tool_calls"]:
                content = await run_tool(calls, environment, call)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            continue
        step = await take_step(calls, environment, message.get("content", ""))
        earned.add(step)
        if step.done or finish_reason == "length" or turn + 1 == environment.max_turns:
            break
        messages += read_observation(step.observation, "step")
    return earned


async def _sample(
    session: AgentSession, messages: Sequence[Mapping[str, Any]], tools: list[dict[str, Any]]
) -> dict[str, Any] | None:
    """The next message; None where the conversation has outgrown the context."""
    try:
        return await session.complete(messages, tools)
    except RequestError as error:
        if session.num_turns == 0 or "chat template" in str(error):
            raise DroppedRolloutError(f"a conversation must fit the model: {error}") from None
        return None
