"""Ids become paths and file names: whatever they hold, nothing beside the data is touched."""

import pytest

from hearth.control.resource_names import check_id, parse_id, parse_model_id
from hearth.errors import RequestError

ODD = {
    "parent": "..%2Foutside",
    "parent, plain": "..",
    "absolute": "%2Fetc%2Fpasswd",
    "encoded twice": "..%252Foutside",
    "backslash": "..%5Coutside",
    "overlong": "a" * 64,
    "very long": "a" * 5000,
    "unicode": "%C3%BC%E6%A8%A1",
    "no utf-8": "%FF%FE",
    "nul": "a%00b",
    "newline": "a%0Ab",
    "upper case": "Job",
    "dash at an end": "job-",
    "space": "a%20b",
    "hidden": ".lock",
    "sql": "a'%20OR%201=1--",
}


@pytest.fixture
def outside(tmp_path, make_plane, script, make_ask):
    """A platform whose data folder has a neighbour that nobody may see."""
    data, neighbour = tmp_path / "data", tmp_path / "outside"
    data.mkdir()
    neighbour.mkdir()
    (neighbour / "manifest.json").write_text('{"created_s": 1}')
    (neighbour / "log").write_text("a secret")
    ask = make_ask(make_plane(script, "sqlite://", data_dir=data))
    yield ask
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["data", "outside", "outside/log", "outside/manifest.json"]
    assert script.started == []


async def refused(ask, method, path, body=None):
    status, content = await ask(method, path, body)
    assert status in (400, 404, 405), (path, body, content)
    assert "secret" not in str(content)
    return content["error"]["message"]


@pytest.mark.slow
async def test_odd_ids_are_refused_where_resources_are_made(outside, job, base):
    for odd in ODD.values():
        for path, body in (
            (f"rlorTrainerJobs?rlorTrainerJobId={odd}", job()),
            (f"rlorTrainerJobs?rlorTrainerJobId=j&deploymentId={odd}", job()),
            (f"deployments?deploymentId={odd}", {"baseModel": base}),
            (f"deployments?deploymentId=d-{odd}", {"baseModel": base}),
        ):
            message = await refused(outside, "POST", path, body)
            assert "must be 1 to 63 of a-z, 0-9 and '-'" in message


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "rlorTrainerJobs/ODD"),
        ("GET", "rlorTrainerJobs/ODD/checkpoints"),
        ("POST", "rlorTrainerJobs/ODD:resume"),
        ("POST", "rlorTrainerJobs/ODD:cancel"),
        ("DELETE", "rlorTrainerJobs/ODD"),
        ("GET", "deployments/ODD"),
        ("PATCH", "deployments/ODD"),
        ("DELETE", "deployments/ODD"),
        ("POST", "checkpoints/ODD:promote"),
        ("GET", "operations/ODD"),
        ("GET", "models/ODD"),
        ("GET", "/v1/models/ODD"),
        ("GET", "trainingShapes/ODD/versions"),
        ("GET", "workers/ODD/log"),
        ("GET", "workers/trainer-ODD/log"),
        ("GET", "workers/deployment-ODD/log"),
        ("GET", "/training/v1/rlorTrainerJobs/me/ODD/api/v1/healthz"),
    ],
)
@pytest.mark.slow
async def test_odd_ids_are_refused_where_resources_are_asked_for(outside, base, method, path):
    body = None
    if "promote" in path:
        body = {"output_model": "accounts/me/models/m", "base_model": base, "trainer_job_id": "j"}
    for odd in ODD.values():
        await refused(outside, method, path.replace("ODD", odd), body or {})


async def test_odd_names_in_bodies_are_refused(outside, job, base):
    promote = "checkpoints/s:promote"
    for odd in ("../outside", "/etc/passwd", "a" * 5000, "ü模", "a\0b", "a\nb", "", ".", "a/../b"):
        model = {"output_model": f"accounts/me/models/{odd}", "base_model": base}
        message = await refused(outside, "POST", promote, model | {"trainer_job_id": "j"})
        assert message.startswith("output_model must be accounts/me/models/ID with 1 to 63 of a-z")
        known = {"output_model": "accounts/me/models/m", "base_model": base}
        await refused(outside, "POST", promote, known | {"trainer_job_id": odd})
        attached = {"baseModel": base, "hotLoadTrainerJob": odd or "/"}
        await refused(outside, "POST", "deployments?deploymentId=d", attached)
        tied = job({"hotLoadDeploymentId": odd or "/"})
        await refused(outside, "POST", "rlorTrainerJobs?rlorTrainerJobId=j", tied)
        await refused(outside, "POST", "/inference/v1/completions", {"model": odd})


async def test_odd_base_models_are_refused(outside):
    for odd in ("~nobody-of-this-name/x", "a" * 5000 + "/", "/" + "a" * 300, "a\0/"):
        body = {"trainingConfig": {"baseModel": odd + "/x/y"}}
        message = await refused(outside, "POST", "rlorTrainerJobs?rlorTrainerJobId=j", body)
        assert message.startswith("base_model must be an existing folder")


async def test_a_known_id_behind_another_kind_of_worker_has_no_log(
    ask, running, deployed, plane, tmp_path
):
    await running("j")
    await deployed("d")
    for worker in ("export-j", "export-d", "x-d", "-d", "d", "j"):
        assert "worker must be trainer-JOB" in await refused(ask, "GET", f"workers/{worker}/log")
    message = await refused(ask, "GET", "workers/trainer-j/log")
    assert "it runs inside the platform's process" in message


async def test_of_a_long_log_the_end_is_read(ask, running, script, tmp_path):
    await running("j")
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(2**40)  # read whole, no machine would hold it
        file.seek(0, 2)
        file.write(b"\nbefore\nthe last line\n")
    script.logs["trainer-j"] = log

    status, answer = await ask("GET", "workers/trainer-j/log?lines=2")

    assert (status, answer["lines"]) == (200, ["before", "the last line"])


@pytest.mark.parametrize("path", ["rlorTrainerJobs", "deployments", "operations/x"])
async def test_another_account_than_the_one_there_is_is_404(ask, path):
    message = await ask.refused(404, "GET", f"/v1/accounts/you/{path}")

    assert message == "account must be 'me', the one of this platform, got 'you'"


async def test_the_one_account_is_listed(ask):
    assert await ask("GET", "/v1/accounts?pageSize=2") == (
        200,
        {"accounts": [{"name": "accounts/me"}]},
    )


@pytest.mark.parametrize("id", ["a", "0", "a" * 63, "a-b", "a--b", "1-2-3"])
def test_ids_of_letters_digits_and_inner_dashes_are_taken(id):
    assert check_id(id, "id") == id


@pytest.mark.parametrize("id", ["", "-", "a-", "-a", "A", "a_b", "a.b", "a/b", "a\n", "a" * 64])
def test_other_ids_are_refused_with_their_field(id):
    with pytest.raises(RequestError, match="field must be 1 to 63 of a-z, 0-9 and '-'"):
        check_id(id, "field")


@pytest.mark.parametrize("id", ["a", "-", "a" * 63])
def test_a_models_name_ends_with_its_id(id):
    assert parse_model_id(f"accounts/me/models/{id}") == id


def test_an_id_is_its_own_leaf():
    assert (parse_id("j"), parse_id("accounts/me/rlorTrainerJobs/j"), parse_id("")) == (
        "j",
        "j",
        "",
    )


def test_a_name_without_an_account_is_of_the_keys_own():
    assert parse_id("accounts//deployments/grpo-serving") == "grpo-serving"


@pytest.mark.parametrize("name", ["a/j", "accounts/you/rlorTrainerJobs/j", "../j", "/j", "j/"])
def test_what_is_no_name_of_this_account_is_no_id_either(name):
    assert parse_id(name) == name
