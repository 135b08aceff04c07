"""A conversation of at most two turns: after a wrong answer the model is told so and tries again.

Tokens stay as they were sampled. What stands between two answers is rendered by itself and
appended, so the second prompt extends the first turn token by token, and both turns are one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hearth.errors import ConfigError
from hearth.sdk import SampledCompletion
from training.data.rows import prompt_messages
from training.examples.rl.multi_turn_message_in.reward import conversation_reward, is_right
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.rewards import marked_answer
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup

MAX_TURNS = 2
FEEDBACK = "Wrong. {question}"
"""What the user says to a wrong answer; a small model has to be asked again."""

_ANSWER = "[the answer stands here]"


@dataclass
class Transcript:
    """What the model has seen and sampled: parallel lists that only grow, and only at their end."""

    tokens: list[int]
    logprobs: list[float]
    loss_mask: list[int]

    @classmethod
    def of_prompt(cls, ids: Sequence[int]) -> Transcript:
        """The prompt alone."""
        return cls(list(ids), [0.0] * len(ids), [0] * len(ids))

    def add_answer(self, answer: SampledCompletion) -> None:
        """Append what the policy sampled to continue these tokens; it is trained."""
        sampled = answer.full_tokens[answer.prompt_len :]
        self.tokens += sampled
        self.logprobs += answer.inference_logprobs or []
        self.loss_mask += [1] * len(sampled)

    def add_given(self, ids: Sequence[int]) -> None:
        """Append what the policy sees and did not sample; it is not trained."""
        self.tokens += ids
        self.logprobs += [0.0] * len(ids)
        self.loss_mask += [0] * len(ids)


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """The rollout function for rows ``{"messages": [...], "ground_truth": "..."}``."""
    sampler = build_deployment_sampler(setup)
    sample_kwargs = dict(setup.sample_kwargs)
    tokenizer = setup.tokenizer

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutSample | None:
        messages = prompt_messages(sample_prompt)
        transcript = Transcript.of_prompt(
            tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        )
        answers: list[SampledCompletion] = []
        while not is_over(answers, sample_prompt):
            if answers:
                transcript.add_given(feedback_ids(tokenizer, messages, transcript.tokens[-1]))
            completions = await sampler.sample_with_prompt_tokens(
                transcript.tokens, n=1, **sample_kwargs
            )
            if not completions or not completions[0].completion_len:  # no room for an answer
                break
            answers.append(completions[0])
            transcript.add_answer(answers[-1])
        if not answers:
            return None
        last = answers[-1]
        return RolloutSample(
            tokens=transcript.tokens,
            logprobs=transcript.logprobs,
            loss_mask=transcript.loss_mask,
            reward=conversation_reward(is_right(last.text, sample_prompt), turns=len(answers)),
            finish_reason=last.finish_reason,
            text="\n".join(answer.text for answer in answers),
            parsed=marked_answer(last.text) is not None,
        )

    return rollout_fn


def is_over(answers: Sequence[SampledCompletion], row: Mapping[str, Any]) -> bool:
    """Whether no turn follows: there were enough, or the last answer is right or was cut off."""
    if not answers:
        return False
    last = answers[-1]
    return len(answers) == MAX_TURNS or last.finish_reason == "length" or is_right(last.text, row)


def feedback_ids(tokenizer: Any, messages: Sequence[dict[str, str]], end: int) -> list[int]:
    """What the chat template puts between an answer whose last token is ``end`` and the next one.

    Raises:
        ConfigError: the template ends an answer with another token than the model did.
    """
    feedback = FEEDBACK.format(question=messages[-1]["content"])
    conversation = [
        *messages,
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": feedback},
    ]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    # A conversation with the answer's text in it, rendered and tokenized again, may not begin with
    # the sampled tokens: a text can be spelled in several ways, and many templates leave out the
    # reasoning of earlier answers. So only what follows the answer is used.
    first, *rest = tokenizer.encode(text.rpartition(_ANSWER)[2], add_special_tokens=False)
    if first != end:
        raise ConfigError(
            f"an answer must end with token {first}, with which the chat template ends it, got "
            f"{end}: sample without stop strings, or make each turn a segment of a RolloutRun"
        )
    return rest
