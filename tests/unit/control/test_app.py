"""Bodies and answers of the control plane's HTTP face."""

import asyncio
import re
import threading
from dataclasses import fields

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic.alias_generators import to_camel
from tests.unit.control.conftest import ScriptedLauncher, ScriptedWorker
from tests.unit.wire.routes import list_routes
from tests.waiting import until

import hearth
from hearth.launch.spec import DeploymentSpec, TrainerSpec
from hearth.wire.fireworks import Deployment, Promote, TrainerJob, TrainingConfig
from hearth.wire.openapi import CONTROL_ROUTES

JOBS = "rlorTrainerJobs?rlorTrainerJobId=j"
DEPLOYMENTS = "deployments?deploymentId=d"
PROMOTE = "checkpoints/s:promote"
BODIES = [("POST", JOBS), ("POST", DEPLOYMENTS), ("PATCH", "deployments/there"), ("POST", PROMOTE)]


@pytest.mark.parametrize(("method", "path"), BODIES)
async def test_broken_json_is_400_and_shows_what_came(ask, method, path):
    for body in (b"", b"{", b"nonsense", b'{"a": 1e999}', b'"\xff"', b"\0"):
        message = await ask.refused(400, method, path, body)
        assert message.startswith(f"body must be JSON, got {body[:40]!r}: ")


@pytest.mark.parametrize(("method", "path"), BODIES)
async def test_json_that_is_no_object_is_400(ask, method, path):
    for body in (b"[]", b"3", b"null", b'"text"'):
        assert (await ask.refused(400, method, path, body)).startswith("body must be valid, got")


async def test_the_field_that_breaks_its_type_is_named(ask, job):
    message = await ask.refused(400, "POST", JOBS, job(loraRank="many"))
    assert message.startswith("trainingConfig.loraRank must be valid, got 'many'")

    message = await ask.refused(400, "POST", JOBS, {})
    assert message.startswith("trainingConfig must be valid, got")


@pytest.mark.parametrize(
    ("path", "instead"),
    [
        ("/v1/responses", "ask /v1/chat/completions"),
        ("/inference/v1/responses", "ask /inference/v1/chat/completions"),
        ("/inference/v1/generate", "with the prompt's token ids and return_token_ids"),
    ],
)
async def test_what_clients_of_other_servers_ask_is_refused_with_what_answers_here(
    ask, path, instead
):
    message = await ask.refused(404, "POST", path, {"model": "m", "input": "hi"})
    assert message.startswith("path must be one that the platform has")
    assert message.endswith(instead)


@pytest.mark.parametrize("nested", ["list", "object"])
async def test_a_body_that_is_nested_too_deep_is_400(ask, script, base, nested):
    opening, closing = (b"[", b"]") if nested == "list" else (b'{"a":', b"}")
    body = b'{"baseModel":"m","trainingConfig":{"baseModel":"%s"},"extraValues":{"x":%s1%s}}' % (
        base.encode(),
        opening * 600,
        closing * 600,
    )

    for path in (JOBS, DEPLOYMENTS):
        assert "body must be JSON" in await ask.refused(400, "POST", path, body)
    assert script.started == []


async def test_a_body_longer_than_a_record_may_be_is_413(ask, script, base):
    body = {"baseModel": base, "trainingConfig": {"baseModel": base}, "displayName": "x" * 2**20}

    for path in (JOBS, DEPLOYMENTS):
        message = await ask.refused(413, "POST", path, body)
        assert message.startswith("body must be at most 1048576 bytes, got 1048")
    assert script.started == []


async def test_both_spellings_of_a_field_are_read(ask, script, base):
    body = {"training_config": {"base_model": base, "max_context_length": 9}, "forward_only": True}

    _, content = await ask("POST", JOBS, body)

    assert content["trainingConfig"]["maxContextLength"] == 9
    assert content["forwardOnly"] is True


async def test_an_unknown_path_is_answered_in_the_form_of_all_errors(ask):
    for path in ("/v1", "/v1/nothing", "/docs", "/openapi.yaml", "/inference"):
        message = await ask.refused(404, "GET", path)
        assert message == f"path must be one that the platform has, got 'GET {path}'"
    message = await ask.refused(405, "PUT", "/v1/accounts", {})
    assert message == "path must be one that the platform has, got 'PUT /v1/accounts'"


async def test_a_query_that_breaks_its_type_is_400_in_that_form(ask, running):
    await running()

    message = await ask.refused(400, "GET", "rlorTrainerJobs/j/checkpoints?pageSize=many")

    assert message.startswith("pageSize must be valid, got 'many'")


async def test_an_error_carries_the_request_id_it_was_asked_under(ask):
    answer = await ask.http.get("/v1/accounts/me/deployments/d", headers={"x-request-id": "r-1"})

    assert answer.json()["error"]["request_id"] == "r-1"


async def test_the_address_alone_says_what_this_is_and_where_to_go_on(ask):
    status, content = await ask("GET", "/")

    assert status == 200
    assert content["what"].startswith("A Hearth platform, version ")
    for name in ("api", "health", "models"):
        assert (await ask("GET", content[name]))[0] == 200


async def test_the_health_of_the_platform_is_answered(ask):
    status, content = await ask("GET", "/healthz")

    assert (status, content["status"]) == (200, "ok")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(
        [
            "accounts/me/rlorTrainerJobs/there",
            "there",
            "d",
            "../x",
            "/",
            "~",
            "~x/y/z",
            "a\0b",
            "accounts/me/models/m",
            "accounts/fireworks/models/qwen3-8b",
            "BASE",
            "accounts/fireworks/trainingShapes/qwen3-8b",
            "1e400",
        ]
    ),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
# A promotion's fields are spelled as in Python, those of the others in camelCase.
RECORDS = (TrainerJob, TrainingConfig, Deployment)
FIELDS = [
    *(to_camel(name) for kind in RECORDS for name in kind.model_fields),
    *Promote.model_fields,
]
EXTRA = [field.name for spec in (TrainerSpec, DeploymentSpec) for field in fields(spec)]
EXTRA += ["max_context_length", "context_parallel"]
VALUES = st.dictionaries(st.sampled_from(EXTRA), JSON, max_size=4)


VALID = {
    JOBS: {"trainingConfig": {"baseModel": "BASE"}},
    DEPLOYMENTS: {"baseModel": "BASE"},
    "deployments/there": {},
    PROMOTE: {
        "output_model": "accounts/me/models/m",
        "base_model": "BASE",
        "trainer_job_id": "there",
    },
}


@st.composite
def requests(draw):
    """A request that holds, with up to three fields as nobody would set them, or no request."""
    method, path = draw(st.sampled_from(BODIES))
    if draw(st.integers(0, 9)) == 0:
        return method, path, draw(JSON)
    odd = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3)
    body = VALID[path] | draw(odd)
    if path == JOBS and isinstance(body["trainingConfig"], dict):
        body["trainingConfig"] = body["trainingConfig"] | draw(odd)
    if draw(st.booleans()):
        body["extraValues"] = draw(VALUES | JSON)
    return method, path, body


@pytest.mark.slow
def test_no_json_body_makes_the_platform_fail(make_plane, script, make_ask, base):
    plane = make_plane(script, "sqlite://")
    script.saves("trainer-there", "s")
    seen = set()

    @settings(
        max_examples=200,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(requests())
    def fuzz(request):
        method, path, body = request
        sent = orjson.dumps(body).replace(b'"BASE"', orjson.dumps(base))
        status, content = loop.run_until_complete(ask(method, path, sent))
        seen.add((path, status))
        assert status in (200, 400, 404, 409), (body, content)
        assert status == 200 or content["error"]["message"]
        # What was made is readable, and out of the next one's way.
        for id in ("rlorTrainerJobs", "deployments"):
            assert loop.run_until_complete(ask("GET", id))[0] == 200
        plane.store.jobs.delete("j")
        if plane.store.deployments.find("d") is not None:
            plane.deployments.delete("d")

    loop = asyncio.new_event_loop()
    try:
        ask = make_ask(plane)
        made = {"trainingConfig": {"baseModel": base}}
        loop.run_until_complete(ask("POST", "rlorTrainerJobs?rlorTrainerJobId=there", made))
        body = {"baseModel": base}
        loop.run_until_complete(ask("POST", "deployments?deploymentId=there", body))
        fuzz()
    finally:
        loop.close()
    for _, path in BODIES:
        assert {status for request, status in seen if request == path} >= {200, 400}, path


async def test_every_route_is_in_the_published_description(ask):
    status, document = await ask("GET", "/openapi.json")

    assert status == 200
    assert document["info"]["version"] == hearth.__version__
    assert set(CONTROL_ROUTES) == list_routes(ask.app._control)
    jobs = document["paths"]["/v1/accounts/{account}/rlorTrainerJobs"]["post"]
    assert jobs["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/TrainerJob"
    }
    assert {parameter["name"] for parameter in jobs["parameters"]} == {
        "account",
        "rlorTrainerJobId",
        "trainingShape",
        "deploymentId",
    }
    named = set(re.findall(r"#/components/schemas/([^\"]+)", orjson.dumps(document).decode()))
    assert named <= set(document["components"]["schemas"])


@pytest.mark.slow
async def test_workers_that_do_not_end_hold_up_nobody_who_reads(make_plane, make_ask, job):
    may_end = threading.Event()

    class HangingWorker(ScriptedWorker):
        def stop(self, grace_s: float = 5.0) -> None:
            assert may_end.wait(60)

    plane = make_plane(ScriptedLauncher(HangingWorker), "sqlite://")
    ask = make_ask(plane)
    names = [f"job-{number}" for number in range(50)]
    for name in names:
        await ask("POST", f"rlorTrainerJobs?rlorTrainerJobId={name}", job())
    ending = [asyncio.create_task(ask("DELETE", f"rlorTrainerJobs/{name}")) for name in names]
    try:
        await until(lambda: len(ask.app._jobs.list_all()) < len(names))

        status, answer = await asyncio.wait_for(ask("GET", "rlorTrainerJobs/job-49"), 30)
    finally:
        may_end.set()
        await asyncio.gather(*ending)

    assert (status, answer["state"]) == (200, "JOB_STATE_CREATING")
