import httpx
import pytest

from hearth.errors import ConfigError
from hearth.local.gateway import TRAINER_PREFIX, Gateway
from hearth.local.registry import resolve_model


class Echo:
    """An app that answers with its name, the path it was asked for and the body it got."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, scope, receive, send) -> None:
        body = (await receive())["body"].decode()
        text = f"{self.name} {scope['path']} {body}".encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text})


@pytest.fixture
def gateway():
    made = Gateway()
    made.trainers[f"{TRAINER_PREFIX}/me/policy"] = Echo("policy")
    made.trainers[f"{TRAINER_PREFIX}/me/policy-2"] = Echo("policy-2")
    made.deployments["accounts/me/deployments/a"] = Echo("a")
    made.deployments["accounts/me/deployments/b"] = Echo("b")
    return made


async def ask(gateway, path, **request) -> httpx.Response:
    transport = httpx.ASGITransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://platform.test") as client:
        return await client.post(path, **request)


@pytest.mark.parametrize("job", ["policy", "policy-2"])
async def test_a_trainers_prefix_is_taken_off(gateway, job):
    answer = await ask(gateway, f"{TRAINER_PREFIX}/me/{job}/api/v1/forward", content="{}")

    assert answer.text == f"{job} /api/v1/forward {{}}"


async def test_a_deployment_is_found_by_header_and_by_the_bodys_model(gateway):
    path = "/inference/v1/completions"
    header = {"fireworks-deployment": "accounts/me/deployments/b"}

    by_header = await ask(gateway, path, content='{"model": "x"}', headers=header)
    by_body = await ask(gateway, path, content='{"model": "accounts/me/deployments/a"}')

    assert by_header.text == f'b {path} {{"model": "x"}}'
    assert by_body.text == f'a {path} {{"model": "accounts/me/deployments/a"}}'


@pytest.mark.parametrize(
    ("path", "content", "message"),
    [
        (f"{TRAINER_PREFIX}/me/other/api/v1/forward", "{}", "known jobs are"),
        ("/inference/v1/completions", '{"model": "z"}', "known deployments are"),
        ("/inference/v1/completions", "no json", "known deployments are"),
    ],
    ids=["job", "deployment", "no model"],
)
async def test_an_unknown_target_lists_the_known_ones(gateway, path, content, message):
    answer = await ask(gateway, path, content=content)

    assert answer.status_code == 404
    assert message in answer.json()["error"]["message"]


async def test_the_only_deployment_needs_no_name(gateway):
    del gateway.deployments["accounts/me/deployments/b"]

    answer = await ask(gateway, "/v1/completions", content="{}")

    assert answer.text == "a /v1/completions {}"


def test_model_names_resolve_to_what_is_loaded(tmp_path):
    assert resolve_model("accounts/fireworks/models/qwen3-8b") == "Qwen/Qwen3-8B"
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    assert resolve_model("mine", {"mine": "a/b"}) == "a/b"


@pytest.mark.parametrize(
    ("name", "message"),
    [("accounts/me/models/x", "registered are"), ("./nowhere", "an existing folder")],
)
def test_a_name_that_stands_for_nothing_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_model(name)
