import asyncio
import json

import pytest

from hearth.errors import EngineError

JOBS = "rlorTrainerJobs"
MODEL = "accounts/me/models/tuned"


def promotion(base, job="j", **more):
    return {
        "output_model": MODEL,
        "base_model": base,
        "trainer_job_id": f"accounts/me/{JOBS}/{job}",
    } | more


def weights(plane, name="tuned"):
    return (plane.context.models_dir / name / "weights").read_text(encoding="utf-8")


@pytest.fixture
async def saved(running, script):
    """A job that runs and has saved the snapshots ``s``, ``old`` and ``new``."""
    await running()
    for name in ("s", "old", "new"):
        script.saves("trainer-j", name)


@pytest.fixture
def promote(ask, base):
    """Ask for the promotion of a snapshot."""

    async def promote(name="s", job="j", **more):
        return await ask("POST", f"checkpoints/{name}:promote", promotion(base, job, **more))

    return promote


@pytest.fixture
def refuse(ask, base):
    """Ask for a promotion that is refused; its message is the result."""

    async def refuse(status, name="s", job="j", **more):
        body = promotion(base, job, **more)
        return await ask.refused(status, "POST", f"checkpoints/{name}:promote", body)

    return refuse


async def finished(ask, content):
    """The operation of a promotion, once it is done."""
    for _ in range(200):
        _, operation = await ask("GET", f"/v1/{content['operation']['name']}")
        if operation["done"]:
            return operation
        await asyncio.sleep(0.01)
    raise AssertionError("a promotion is not done after 2 s")


def resumable(plane, name, job="j", **more):
    folder = plane.context.checkpoint_dir(job) / name
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"created_s": 1.5} | more))


async def test_pages_follow_each_other_and_end(ask, script, running):
    await running()
    for number in range(5):
        script.saves("trainer-j", f"s-{number}")

    names, token = [], ""
    for expected in (2, 2, 1):
        path = f"{JOBS}/j/checkpoints?pageSize=2&pageToken={token}"
        _, page = await ask("GET", path)
        assert len(page["checkpoints"]) == expected
        names += [record["name"].rsplit("/", 1)[-1] for record in page["checkpoints"]]
        token = page["nextPageToken"]

    assert token == ""
    assert names == [f"s-{number}" for number in range(5)]
    _, whole = await ask("GET", f"{JOBS}/j/checkpoints")
    assert (len(whole["checkpoints"]), whole["nextPageToken"]) == (5, "")


async def test_a_page_token_that_no_page_ended_with_is_refused(ask, script, running):
    await running()

    for token in ("-1", "6", "x", "²", "1" * 5000):
        path = f"{JOBS}/j/checkpoints?pageToken={token}"
        message = await ask.refused(400, "GET", path)
        assert "pageToken must be one that a page ended with" in message


async def test_a_folder_without_a_whole_manifest_is_no_checkpoint(ask, plane, running):
    await running()
    resumable(plane, "good", metadata={"step": 3})
    resumable(plane, ".draft-good-1")
    for content in ("", "[]", "{"):
        folder = plane.context.checkpoint_dir("j") / f"bad{len(content)}{content[:1]}"
        folder.mkdir()
        (folder / "manifest.json").write_text(content)

    _, page = await ask("GET", f"{JOBS}/j/checkpoints")

    assert page["checkpoints"] == [
        {
            "name": f"accounts/me/{JOBS}/j/checkpoints/good",
            "createTime": "1970-01-01T00:00:01.500000Z",
            "updateTime": "1970-01-01T00:00:01.500000Z",
            "checkpointType": "CHECKPOINT_TYPE_TRAINING",
            "promotable": False,
            "metadata": {"step": 3},
        }
    ]


async def test_a_clock_set_back_changes_no_order(ask, plane, running):
    await running()
    for number, name in enumerate(("c", "a", "b"), start=1):
        resumable(plane, name, number=number, created_s=9.0 - number)
    resumable(plane, "old", created_s=99.0)
    resumable(plane, "damaged", number="x")

    _, page = await ask("GET", f"{JOBS}/j/checkpoints")

    names = [checkpoint["name"].rpartition("/")[2] for checkpoint in page["checkpoints"]]
    assert names == ["old", "c", "a", "b"]


async def test_a_job_that_never_was_has_no_checkpoints(ask, running):
    await running("known")

    message = await ask.refused(404, "GET", f"{JOBS}/other/checkpoints")

    assert message == "trainer job must be one of ['known'], got 'other'"


async def test_a_promotion_answers_the_model_or_the_operation_that_makes_it(
    ask, saved, promote, plane
):
    status, content = await promote()
    assert status == 200
    assert content["model"]["name"] == MODEL
    assert content["model"]["state"] == "READY"
    assert weights(plane) == "s"

    other = "accounts/me/models/other"
    status, content = await promote(output_model=other, async_promotion=True)
    assert status == 200
    done = await finished(ask, content)
    assert done["response"]["name"] == "accounts/me/models/other"
    assert weights(plane, "other") == "s"


async def test_a_promoted_model_is_listed_and_can_be_a_base_model(
    ask, script, saved, promote, job, plane
):
    await promote()

    status, run = await ask("GET", f"/v1/{MODEL}")
    assert (status, run["source"]) == (200, str(plane.context.models_dir / "tuned"))
    assert run["baseModelDetails"]["moe"] is False
    _, listed = await ask("GET", "/v1/accounts/me/models")
    assert [model["name"] for model in listed["models"]] == [MODEL]

    status, _ = await ask("POST", f"{JOBS}?rlorTrainerJobId=next", job(baseModel=MODEL))
    assert status == 200
    assert script.last("next").spec.source == run["source"]
    body = job(baseModel="accounts/me/models/other")
    message = await ask.refused(400, "POST", f"{JOBS}?rlorTrainerJobId=x", body)
    assert MODEL in message


async def test_an_unknown_model_lists_registered_and_promoted_ones(ask, saved, promote):
    await promote()

    message = await ask.refused(404, "GET", "/v1/accounts/me/models/other")

    assert MODEL in message
    assert "accounts/fireworks/models/qwen3-8b" in message


async def test_an_unknown_snapshot_lists_those_that_there_are(script, saved, refuse, plane):
    resumable(plane, "step-1")

    message = await refuse(404, "other")
    assert "got 'other', which is unknown" in message
    assert "are ['s', 'old', 'new']" in message
    message = await refuse(404, "step-1")
    assert "which is a resumable checkpoint" in message
    message = await refuse(404, job="other")
    assert message == "trainer job must be one of ['j'], got 'other'"
    assert script.exports == []


async def test_a_model_name_that_breaks_its_rule_is_refused(script, saved, refuse):
    for name in (
        "tuned",
        "accounts/you/models/m",
        "",
        *(f"accounts/me/models/{id}" for id in ("", "A", "../m", "m" * 64, "m/")),
    ):
        message = await refuse(400, output_model=name)
        assert "output_model must be accounts/me/models/ID" in message
    assert script.exports == []


async def test_another_base_model_is_not_promoted(saved, refuse, base):
    message = await refuse(400, base_model="other")
    assert f"base_model must be {base!r}, which the job trained, got 'other'" in message


async def test_the_same_promotion_twice_is_one_model(ask, script, saved, promote):
    script.may_export.clear()

    _, first = await promote(async_promotion=True)
    _, second = await promote(async_promotion=True)
    assert first == second
    script.may_export.set()
    done = await finished(ask, first)
    _, third = await promote(async_promotion=True)
    _, fourth = await promote()

    assert third["operation"] == done
    assert fourth["model"] == done["response"]
    assert len(script.exports) == 1


async def test_a_promotion_that_is_soon_done_is_answered_when_it_is(script, saved, promote, looks):
    looks(60.0)
    script.may_export.clear()
    promoting = asyncio.create_task(promote(async_promotion=True))
    await asyncio.sleep(0.1)
    assert not promoting.done()

    script.may_export.set()

    assert (await promoting)[1]["operation"]["done"]


async def test_a_model_that_another_job_made_is_409(script, saved, running, promote, refuse):
    await running("k")
    script.saves("trainer-k", "s")
    await promote()

    message = await refuse(409, job="k")

    assert f"output_model must be new, got {MODEL!r}" in message
    assert "'job': 'j'" in message
    assert len(script.exports) == 1


async def test_the_job_that_made_a_model_makes_it_anew_and_it_is_the_old_one_until_then(
    ask, script, saved, promote, refuse, plane
):
    await promote("old")
    _, before = await ask("GET", f"/v1/{MODEL}")

    script.may_export.clear()
    _, content = await promote("new", async_promotion=True)
    _, again = await promote("new", async_promotion=True)
    assert again == content
    assert await ask("GET", f"/v1/{MODEL}") == (200, before)
    assert weights(plane) == "old"
    message = await refuse(425, "old", async_promotion=True)
    assert "it is being made of" in message
    assert "promote again when that is done" in message

    script.may_export.set()
    done = await finished(ask, content)
    _, after = await ask("GET", f"/v1/{MODEL}")
    assert done["response"] == after
    assert after["source"] == before["source"]
    assert after["createTime"] > before["createTime"]
    assert weights(plane) == "new"
    assert [path.name for path in plane.context.models_dir.iterdir() if path.name[0] != "."] == [
        "tuned"
    ]

    await promote("old")
    assert weights(plane) == "old"


async def test_an_export_that_fails_leaves_the_old_model_as_it_was(
    ask, script, saved, promote, refuse, plane
):
    await promote("old")
    _, before = await ask("GET", f"/v1/{MODEL}")
    script.export_error = EngineError("no room on the disk")

    assert await refuse(400, "new") == "no room on the disk"
    assert await ask("GET", f"/v1/{MODEL}") == (200, before)
    assert weights(plane) == "old"

    script.export_error = None
    status, _ = await promote("new")
    assert (status, weights(plane)) == (200, "new")


@pytest.mark.parametrize("error", [EngineError("no room"), ZeroDivisionError("no room")])
async def test_a_first_export_that_fails_leaves_no_model_and_is_told(
    ask, script, saved, promote, plane, error
):
    script.export_error = error

    _, content = await promote(async_promotion=True)
    done = await finished(ask, content)

    assert done["error"]["message"] == "no room"
    assert "response" not in done
    await ask.refused(404, "GET", f"/v1/{MODEL}")
    assert not (plane.context.models_dir / "tuned").exists()
    script.export_error = None
    assert (await promote())[0] == 200


async def test_a_deleted_jobs_snapshots_are_listed_and_promoted(ask, saved, promote, plane):
    await ask("DELETE", f"{JOBS}/j")

    _, page = await ask("GET", f"{JOBS}/j/checkpoints")
    assert [record["promotable"] for record in page["checkpoints"]] == [True] * 3
    status, _ = await promote()

    assert (status, weights(plane)) == (200, "s")


async def test_a_promotion_that_a_restart_interrupts_is_failed_and_can_be_asked_again(
    make_plane, make_ask, script, job, base
):
    first = make_plane(script)
    ask = make_ask(first)
    await ask("POST", f"{JOBS}?rlorTrainerJobId=j", job())
    script.saves("trainer-j", "old")
    script.saves("trainer-j", "new")
    await ask("POST", "checkpoints/old:promote", promotion(base))
    script.may_export.clear()
    _, again = await ask("POST", "checkpoints/new:promote", promotion(base, async_promotion=True))
    other = {"output_model": "accounts/me/models/other", "async_promotion": True}
    _, queued = await ask("POST", "checkpoints/new:promote", promotion(base, **other))
    # What a killed platform leaves: a half-written folder, and records that say it goes on.
    left = first.context.models_dir / ".promoting" / "half"
    left.mkdir(parents=True)

    next_script = type(script)()
    next_script.adopts = True
    next_script.buckets = script.buckets
    second = make_plane(next_script)
    second.recover()
    ask = make_ask(second)

    for content in (again, queued):
        _, operation = await ask("GET", f"/v1/{content['operation']['name']}")
        assert operation["done"] is True
        message = operation["error"]["message"]
        assert message == "the platform was restarted: promote again"
    assert not left.exists()
    assert weights(second) == "old"
    await ask.refused(404, "GET", "/v1/accounts/me/models/other")
    status, _ = await ask("POST", "checkpoints/new:promote", promotion(base))
    assert (status, weights(second)) == (200, "new")


async def test_a_folder_whose_row_was_never_written_is_made_anew(saved, promote, plane):
    folder = plane.context.models_dir / "tuned"
    folder.mkdir(parents=True)
    (folder / "weights").write_text("half of a promotion")

    status, _ = await promote()

    assert (status, weights(plane)) == (200, "s")


async def test_a_platform_that_ends_begins_no_promotion(script, saved, refuse, plane):
    plane.checkpoints.stop_accepting()

    assert "promote again once it is back" in await refuse(410)
    assert script.exports == []


async def test_who_waits_for_a_promotion_when_the_platform_ends_is_told_so(
    script, saved, refuse, plane
):
    script.may_export.clear()
    waiting = asyncio.create_task(refuse(410))
    await asyncio.sleep(0.1)
    assert not waiting.done()

    plane.store.release_waiters()

    message = await asyncio.wait_for(waiting, 1)
    assert message == "platform must be open to promote, got one that ends: promote again"


async def test_an_unknown_operation_is_404(ask):
    await ask.refused(404, "GET", "/v1/accounts/me/operations/other")
