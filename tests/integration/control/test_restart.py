"""A control plane that comes back to what an earlier one with the same database had started."""

import pytest

from hearth.control.context import Context
from hearth.local.inline import InlineLauncher
from hearth.wire.fireworks import Deployment, DeploymentPatch, TrainerJob


@pytest.fixture
def again(make_plane, script):
    """What the next platform finds: its launcher, to be set up before, and itself, recovered."""
    next_script = type(script)()

    def make(**settings):
        vars(next_script).update(settings)
        plane = make_plane(next_script)
        plane.recover()
        return plane, next_script

    return make


def describe_job(base):
    return TrainerJob.from_dict({"trainingConfig": {"baseModel": base}})


@pytest.fixture
def first(make_plane, script, base):
    """A platform with a job and a deployment that run."""
    plane = make_plane(script)
    plane.jobs.create("j", describe_job(base), None)
    script.last("j").starts()
    plane.deployments.create("d", Deployment(base_model=base))
    script.last("d").starts()
    return plane


def test_jobs_and_deployments_that_still_run_are_running_again(first, again, script):
    second, found = again(adopts=True)

    assert second.jobs.get("j").state == "JOB_STATE_RUNNING"
    worker = found.started[0]
    assert worker.number == script.last("j").number, "it was found by what was written down of it"
    worker.spec.worker_id = "trainer-j"
    worker.starts()
    assert second.jobs.get("j").state == "JOB_STATE_RUNNING"
    assert second.jobs.find_endpoint("j").app == worker.answer
    replica = found.started[1]
    assert replica.number == script.last("d").number
    replica.spec.worker_id = "deployment-d"
    replica.starts()
    assert second.deployments.find_endpoint("d").app == replica.answer
    second.jobs.cancel("j")
    assert worker.stops == 1


def test_jobs_whose_trainers_ended_are_failed_and_deployments_start_again(first, again):
    second, found = again(reason="ended by SIGKILL")

    job = second.jobs.get("j")
    assert (job.state, job.status_message) == ("JOB_STATE_FAILED", "ended by SIGKILL")
    deployment = second.deployments.get("d")
    assert (deployment.state, deployment.status_message) == ("UPDATING", "ended by SIGKILL")
    assert [worker.spec.worker_id for worker in found.started] == ["deployment-d"]
    found.last("d").starts()
    assert second.deployments.get("d").state == "READY"
    second.jobs.resume("j")
    found.last("j").starts()
    assert second.jobs.get("j").state == "JOB_STATE_RUNNING"


def test_what_was_written_and_never_started_is_started(make_plane, again, script, base):
    first = make_plane(script)
    # As a platform leaves it that is killed between writing a record and starting its worker.
    first.store.jobs.insert("j", "JOB_STATE_CREATING", describe_job(base).as_dict())
    first.store.deployments.insert("d", "CREATING", Deployment(base_model=base).as_dict())

    second, found = again()

    assert second.jobs.get("j").state == "JOB_STATE_CREATING"
    found.last("j").starts()
    found.last("d").starts()
    assert second.jobs.get("j").state == "JOB_STATE_RUNNING"
    assert second.deployments.get("d").state == "READY"


def test_what_ended_before_it_ever_answered_is_started_again(make_plane, again, script, base):
    make_plane(script).jobs.create("j", describe_job(base), None)

    second, found = again(reason="was gone when the control plane came back")

    assert second.jobs.get("j").state == "JOB_STATE_CREATING"
    found.last("j").starts()
    assert second.jobs.get("j").state == "JOB_STATE_RUNNING"


def test_what_had_ended_stays_as_it_was(make_plane, again, script, base):
    first = make_plane(script)
    for id in ("cancelled", "failed", "deleted"):
        first.jobs.create(id, describe_job(base), None)
        script.last(id).starts()
    first.jobs.cancel("cancelled")
    script.last("failed").dies("no memory")
    first.jobs.delete("deleted")
    for id in ("zero", "failed"):
        first.deployments.create(id, Deployment(base_model=base))
    zero = DeploymentPatch(min_replica_count=0, max_replica_count=0)
    script.last("zero").starts()
    first.deployments.patch("zero", zero)
    script.last("failed").dies("no memory")

    second, found = again()

    assert found.started == []
    states = {id: second.jobs.get(id).state for id in ("cancelled", "failed", "deleted")}
    assert states == {
        "cancelled": "JOB_STATE_CANCELLED",
        "failed": "JOB_STATE_FAILED",
        "deleted": "JOB_STATE_DELETED",
    }
    assert second.deployments.get("zero").status_message == "scaled to zero"
    assert second.deployments.get("failed").status_message == "no memory"


def test_a_job_whose_model_left_the_catalog_is_failed_with_that_reason(
    make_plane, again, script, base
):
    first = make_plane(script)
    gone = TrainerJob.from_dict({"trainingConfig": {"baseModel": "accounts/x/models/gone"}})
    first.store.jobs.insert("j", "JOB_STATE_CREATING", gone.as_dict())
    model = Deployment(base_model="accounts/x/models/gone")
    first.store.deployments.insert("d", "CREATING", model.as_dict())

    second, _ = again()

    job, deployment = second.jobs.get("j"), second.deployments.get("d")
    assert job.state == "JOB_STATE_FAILED"
    assert "cannot be started: base_model must be a registered name" in job.status_message
    assert deployment.state == "FAILED"
    assert "accounts/x/models/gone" in deployment.status_message


@pytest.mark.parametrize(
    "change",
    [{"worker": {"spec": 7}}, {"body": {"baseModel": []}, "worker": None}],
    ids=["worker", "body"],
)
def test_records_that_make_no_sense_are_failed_and_the_others_are_found(
    make_plane, again, script, base, change
):
    first = make_plane(script)
    for id in ("odd", "good"):
        first.jobs.create(id, describe_job(base), None)
        script.last(id).starts()
        first.deployments.create(id, Deployment(base_model=base))
        script.last(id).starts()
    for records in (first.store.jobs, first.store.deployments):
        records.update("odd", **change)
    first.store.operations.insert("o", "running", {"done": []})
    first.store.models.insert("accounts/me/models/odd", "READY", {"kind": "HF_BASE_MODEL"})

    second, found = again(adopts=True)

    assert second.store.jobs.get("odd").state == "JOB_STATE_FAILED"
    assert "could not be read after a restart" in second.store.jobs.get("odd").message
    assert second.store.deployments.get("odd").state == "FAILED"
    assert second.jobs.get("good").state == "JOB_STATE_RUNNING"
    assert "good" in [job.name.rpartition("/")[2] for job in second.jobs.list_all()]
    assert second.deployments.get("good").state == "READY"
    assert len(found.started) == 2, "the good job's worker and the good deployment's"
    assert second.checkpoints.get_operation("o").done
    second.jobs.create("new", describe_job(base), None)


def test_a_deployment_that_was_being_deleted_is_gone(make_plane, again, script, base):
    first = make_plane(script)
    first.deployments.create("d", Deployment(base_model=base))
    first.store.deployments.update("d", state="DELETING", worker=None)

    second, found = again()

    assert second.deployments.list_all() == []
    assert found.started == []


def test_after_a_restart_inline_jobs_are_failed_and_deployments_serve_again(
    make_plane, base, tmp_path
):
    first = make_plane(InlineLauncher(tmp_path))
    first.jobs.create("j", describe_job(base), None)
    first.deployments.create("d", Deployment(base_model=base))
    await_state(first.store.jobs, "j", "JOB_STATE_RUNNING")
    await_state(first.store.deployments, "d", "READY")
    first.context.launcher.close()

    second = make_plane(InlineLauncher(tmp_path))
    assert isinstance(second.context, Context)
    second.recover()

    job = second.jobs.get("j")
    assert job.state == "JOB_STATE_FAILED"
    assert job.status_message == "it ran inside a process that has ended"
    await_state(second.store.deployments, "d", "READY")
    second.jobs.resume("j")
    await_state(second.store.jobs, "j", "JOB_STATE_RUNNING")


def await_state(records, id, state):
    while True:
        changed = records.changes.next_change(id)
        record = records.get(id)
        if record.state == state:
            return
        assert record.state in ("JOB_STATE_CREATING", "CREATING", "UPDATING"), record
        changed.result(20)
