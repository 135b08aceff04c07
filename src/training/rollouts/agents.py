"""Agents that only know OpenAI's API as rollouts: what they sample is captured, token by token.

agents = build_agent_server(setup)              # once, in make_rollout_fn

async def rollout_fn(row):
    with agents.session() as session:
        client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
        answer = await my_agent(client, row)    # any number of turns
    return session.run(reward=score(answer, row))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hearth.sdk import DeploymentSampler, SamplingRetryPolicy
from training.rollouts.sampler import current_rollout, refuse_other_distribution
from training.samples.rollout import RolloutRun, RolloutSample, RolloutSetup

if TYPE_CHECKING:  # an HTTP server, which most recipes do without
    from hearth.sdk.capture import CaptureServer, CaptureSession


class AgentSession:
    """One trajectory of an agent. ``base_url`` and ``api_key`` are for its OpenAI client."""

    def __init__(self, server: CaptureServer, captured: CaptureSession) -> None:
        self._server = server
        self._captured = captured
        self.base_url = captured.base_url
        self.api_key = captured.api_key

    def __enter__(self) -> AgentSession:
        return self

    def __exit__(self, *_error: object) -> None:
        self._captured.close()

    @property
    def num_turns(self) -> int:
        """Answers that the deployment has given."""
        return len(self._captured.turns)

    async def complete(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        """The next message, as an OpenAI client would get it, with its ``finish_reason`` beside.

        Raises:
            RequestError: the deployment refuses the conversation, as one that outgrows the context.
        """
        return await self._server.complete(self._captured, messages, tools)

    def run(
        self, reward: float, *, parsed: bool | None = None, parts: Mapping[str, float] | None = None
    ) -> RolloutRun | None:
        """The trajectory with its reward; None without any answer.

        ``parsed`` says whether the reward found the answer that it looks for (``Score.parsed``),
        ``parts`` what the reward is made of (``Score.parts``).

        Turns that extend each other token by token are one sample. A turn whose conversation was
        rendered differently (a template that drops earlier reasoning, a history that the agent
        shortened) begins another one: both are trained as they were sampled, with one advantage.
        """
        segments = [
            RolloutSample(
                tokens=chain.tokens,
                logprobs=chain.logprobs,
                loss_mask=chain.loss_mask,
                reward=reward,
                finish_reason=chain.finish_reason,
                text=chain.text,
                versions=chain.versions,
                routing_matrices=chain.routing_matrices and chain.routing_matrices[1:],
                parsed=parsed,
                seeds=list(chain.seeds),
                reward_parts=parts,
            )
            for chain in self._captured.chains()
        ]
        return RolloutRun(segments, run_id=self._captured.id) if segments else None


class AgentServer:
    """Opens sessions on the run's deployment; see ``build_agent_server``."""

    def __init__(self, server: CaptureServer) -> None:
        self._server = server

    def session(self) -> AgentSession:
        """A session for the running rollout; its seeds are the same in every run."""
        rollout = current_rollout.get()
        seed = None if rollout is None else rollout.next_seed(1)
        return AgentSession(self._server, self._server.session(seed=seed))


def build_agent_server(setup: RolloutSetup) -> AgentServer:
    """A server on a loopback port for agents on this machine, closed with the run.

    Temperature, ``top_p``, ``top_k`` and the longest completion are the recipe's, whatever a client
    asks for: the trainer scores under the distribution that it knows of. The agents' requests count
    towards the run's limit of requests in flight.

    Raises:
        ConfigError: ``setup.sample_kwargs`` was changed so that it truncates.
    """
    from hearth.sdk.capture import CaptureServer

    options = setup.sample_kwargs
    refuse_other_distribution(options, options["temperature"])
    sampler = DeploymentSampler(
        setup.inference_base_url,
        setup.model,
        setup.api_key,
        concurrency_controller=setup.concurrency,
        http_timeout_s=options["http_timeout"],
        retry_policy=SamplingRetryPolicy(boot_s=setup.boot_timeout_s),
    )
    setup.closing.callback(sampler.close)
    server = CaptureServer(
        sampler,
        sampling={
            "temperature": options["temperature"],
            "top_p": options["top_p"],
            "top_k": options["top_k"],
            "max_completion_tokens": options["max_tokens"],
            **{name: options[name] for name in ["include_routing_matrix"] if name in options},
        },
    )
    setup.closing.callback(server.close)
    return AgentServer(server)
