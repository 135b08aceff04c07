"""One trajectory: four times search and read, then answer.

A turn of the policy is ``search WORDS`` or ``answer WORDS``. What the tool finds is appended as
token ids of its own, so that the policy's tokens stay as they were sampled.
"""

from __future__ import annotations

from typing import Any

from training.data.rows import prompt_messages
from training.examples.rl.multihop_qa.corpus import make_world
from training.examples.rl.multihop_qa.reward import ANSWER, SEARCH, answer_is_right
from training.examples.rl.multihop_qa.search import SearchIndex
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup

SEARCHES = 4
"""Searches before the answer; the longest way needs them all."""


def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
    """The rollout function for the rows of ``question_rows``."""
    sampler = build_deployment_sampler(setup)
    sample_kwargs = dict(setup.sample_kwargs)
    tokenizer = setup.tokenizer
    index = SearchIndex(make_world().documents())

    async def rollout_fn(sample_prompt: dict[str, Any]) -> RolloutSample | None:
        tokens: list[int] = tokenizer.apply_chat_template(
            prompt_messages(sample_prompt),
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        logprobs, loss_mask = [0.0] * len(tokens), [0] * len(tokens)
        turns: list[str] = []
        finish_reason = "stop"
        while True:
            sample = await sampler.sample_with_prompt_tokens(tokens, n=1, **sample_kwargs)
            if not sample:  # no room below max_seq_len
                break
            completion = sample[0]
            assert completion.inference_logprobs is not None, "this sampler refuses those without"
            tokens = list(completion.full_tokens)
            logprobs += completion.inference_logprobs
            loss_mask += [1] * completion.completion_len
            turns.append(completion.text.strip())
            finish_reason = completion.finish_reason
            verb, _, words = turns[-1].partition(" ")
            if verb != SEARCH or finish_reason == "length" or len(turns) > SEARCHES:
                break
            found = tool_ids(tokenizer, index.search(words))
            tokens += found
            logprobs += [0.0] * len(found)
            loss_mask += [0] * len(found)
        if not turns:
            return None
        return RolloutSample(
            tokens=tokens,
            logprobs=logprobs,
            loss_mask=loss_mask,
            reward=float(answer_is_right(turns[-1], sample_prompt)),
            finish_reason=finish_reason,
            text="\n".join(turns),
            parsed=turns[-1].split()[:1] == [ANSWER],
        )

    return rollout_fn


def tool_ids(tokenizer: Any, text: str) -> list[int]:
    """What stands between a turn of the policy and its next one: the tool's answer."""
    return tokenizer.apply_chat_template(
        [{"role": "tool", "content": text}],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
