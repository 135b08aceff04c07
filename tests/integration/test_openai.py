"""OpenAI's client against a whole platform: the gateway, and a deployment behind it."""

import httpx
import openai
import pytest
from tests.unit.control.test_metrics import read as read_metrics

from hearth.control.app import create_gateway
from hearth.control.gateway import Access
from hearth.local import EmbeddedPlatform
from hearth.sdk import DeploymentConfig, DeploymentManager
from training.quickstart import MODEL

KEY = {"x-api-key": "secret"}
NAME = "accounts/me/deployments/chat"


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    with EmbeddedPlatform(work_dir=tmp_path_factory.mktemp("platform")) as platform:
        deployments = DeploymentManager("key", platform.base_url)
        deployments.create_or_get(DeploymentConfig(deployment_id="chat", base_model=str(MODEL)))
        deployments.wait_for_ready("chat")
        yield platform


@pytest.fixture
async def client(platform):
    gateway = create_gateway(platform.plane, Access(api_keys={"secret": "me"}))
    transport = httpx.ASGITransport(gateway)
    async with httpx.AsyncClient(transport=transport) as http:
        yield openai.AsyncOpenAI(
            api_key="secret", base_url="http://platform/v1", http_client=http, max_retries=0
        )


@pytest.mark.parametrize("model", [NAME, "chat"])
async def test_a_completion_of_token_ids_by_full_name_and_by_id(client, model):
    completion = await client.completions.create(
        model=model, prompt=[5, 17, 40], max_tokens=4, n=2, logprobs=1, seed=3
    )

    assert [choice.index for choice in completion.choices] == [0, 1]
    counts = [len(choice.logprobs.token_logprobs) for choice in completion.choices]
    assert sum(counts) == completion.usage.completion_tokens
    assert all(0 < count <= 4 for count in counts)


async def test_a_chat_streams_the_text_that_it_gives_at_once(client):
    asked = {
        "model": "chat",
        "messages": [{"role": "user", "content": "What is 2 + 3?"}],
        "max_completion_tokens": 8,
        "seed": 1,
    }

    whole = await client.chat.completions.create(**asked)
    pieces = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]

    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


async def test_prometheus_reads_how_many_tokens_were_sampled(client, platform):
    ask = client._client
    before = read_metrics((await ask.get("http://platform/metrics", headers=KEY)).text)

    completion = await client.completions.create(model="chat", prompt=[5, 17, 40], max_tokens=4)
    after = read_metrics((await ask.get("http://platform/metrics", headers=KEY)).text)

    grown = {name: after[name] - before[name] for name in after if name.endswith(" chat")}
    assert grown["hearth_deployment_completions_total chat"] == 1
    assert grown["hearth_deployment_prompt_tokens_total chat"] == 3
    sampled = grown["hearth_deployment_completion_tokens_total chat"]
    assert sampled == completion.usage.completion_tokens
    assert after["hearth_deployment_completions_in_progress chat"] == 0
    assert after["hearth_deployment_weight_version chat"] == 0


async def test_the_models_are_the_deployments(client):
    listed = [model.id async for model in client.models.list()]
    value = await client.models.retrieve(NAME)

    assert listed == [NAME]
    assert value.id == NAME


async def test_a_wrong_key_and_an_unknown_model_are_the_clients_own_errors(client, platform):
    with pytest.raises(openai.NotFoundError, match=r"must be one of \['chat'\]"):
        await client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.AuthenticationError, match="must be a key of this platform"):
        await client.with_options(api_key="guess").models.list()
