"""Weights that are swapped amid a completion, through the SDK on an embedded platform."""

import asyncio

import pytest
from tests.integration.stacks import BASE, PROMPT, PlatformStack

from hearth.sdk import WeightSyncer

LONG = 900


@pytest.fixture
def stack(tmp_path):
    stack = PlatformStack(tmp_path, context_length=1024)
    yield stack
    stack.close()


async def sample(stack, max_tokens):
    """One completion."""
    (completion,) = await stack.sampler.sample_with_prompt_tokens(
        PROMPT, max_tokens=max_tokens, seed=3, ignore_eos=True
    )
    return completion


@pytest.mark.parametrize("running_requests", ["keep", "drain"])
async def test_a_weight_sync_waits_for_a_long_completion_only_if_it_is_to_drain(
    stack, running_requests
):
    syncer = WeightSyncer(
        stack.policy, stack.deployments, "d", BASE, running_requests=running_requests
    )
    identity = syncer.save_only("step-1")
    long = asyncio.ensure_future(sample(stack, LONG))
    await asyncio.sleep(0)
    # The deployment takes requests in their order: the long one runs when this one has ended.
    await sample(stack, 4)

    await asyncio.to_thread(syncer.hotload, identity)
    was_done = long.done()
    late = await sample(stack, 4)
    completion = await long

    assert syncer.version == 1
    assert late.versions == [[1, 4]]
    assert sum(count for _, count in completion.versions) == completion.completion_len == LONG
    assert len(completion.inference_logprobs) == LONG
    assert (completion.weight_version, completion.snapshot_identity) == (0, None)
    versions = [version for version, _ in completion.versions]
    if running_requests == "keep":
        assert (versions, was_done) == ([0, 1], False)
    else:
        assert versions == [0]
