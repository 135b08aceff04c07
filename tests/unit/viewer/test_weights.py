import json

import pytest

from hearth.errors import NotFoundError
from hearth.viewer.weights import explain_refusal, find_weights, take_turn

RECORD = {
    "tokens": [5, 6, 7, 8, 9, 10],
    "loss_mask": [False, False, True, True, False, True],
    "versions": [-1, -1, 3, 3, -1, 4],
    "seeds": [11, 12],
    "started": 100.0,
    "sample_s": 5.0,
}


def write_run(folder, *, timeline, checkpoints=(), config=None, snapshots=()):
    (folder / "config.json").write_text(json.dumps({"deployment": {}} | (config or {})))
    (folder / "timeline.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in timeline))
    entries = [{"name": f"step-{step:05d}", "step": step, "job": "job"} for step in checkpoints]
    (folder / "run.json").write_text(json.dumps({"checkpoints": entries}))
    for entry in entries:
        place = folder / "checkpoints" / "job" / entry["name"]
        place.mkdir(parents=True)
        (place / "manifest.json").write_text("{}")
    for step in snapshots:
        place = folder / "buckets" / "trainer" / f"step-{step:05d}-ab"
        place.mkdir(parents=True)
        (place / "manifest.json").write_text(json.dumps({"metadata": {"step": step}}))


def event(time, name, **fields):
    return {"type": "event", "time": time, "name": name, **fields}


def syncs(*times_steps_versions):
    return [
        event(time, "weight_sync", step=step, version=version)
        for time, step, version in times_steps_versions
    ]


def test_a_turn_is_its_tokens_those_before_it_and_its_seed():
    assert take_turn(RECORD, 0).prompt == [5, 6]
    assert take_turn(RECORD, 0).tokens == [7, 8]
    assert take_turn(RECORD, 0).seed == 11
    assert take_turn(RECORD, 1).prompt == [5, 6, 7, 8, 9]
    assert (take_turn(RECORD, 1).tokens, take_turn(RECORD, 1).seed) == ([10], 12)
    assert take_turn(RECORD | {"seeds": [11, 12, 13]}, 1).seed is None
    with pytest.raises(NotFoundError, match="turn must be below 2"):
        take_turn(RECORD, 2)
    with pytest.raises(NotFoundError, match=r"of one weight version, got \[3, 4\]"):
        take_turn(
            RECORD
            | {
                "loss_mask": [False, False, True, True, True, True],
                "versions": [-1, -1, 3, 3, 3, 4],
            }
        )


def test_weights_are_those_of_the_step_that_published_the_version(tmp_path):
    timeline = [event(0, "start"), *syncs((10, 2, 1), (20, 4, 2), (30, 6, 3), (40, 8, 4))]
    # A span is of the step under way.
    timeline.append({"type": "span", "name": "weight_sync", "end": 41, "version": 3, "step": 9})
    write_run(tmp_path, timeline=timeline, checkpoints=[4, 6], snapshots=[8])

    first = find_weights(tmp_path, RECORD, 0)
    second = find_weights(tmp_path, RECORD, 1)

    assert (first.kind, first.step, first.version) == ("checkpoint", 6, 3)
    assert first.folder == tmp_path / "checkpoints" / "job" / "step-00006"
    assert (second.kind, second.step, second.version) == ("snapshot", 8, 4)


def test_a_resumed_run_counts_its_versions_anew(tmp_path):
    timeline = [event(0, "start"), *syncs((10, 1, 1), (20, 2, 2), (30, 3, 3))]
    timeline += [event(50, "resume"), *syncs((60, 2, 1), (70, 3, 2), (80, 4, 3), (110, 5, 3))]
    write_run(tmp_path, timeline=timeline, checkpoints=[3, 4])

    assert find_weights(tmp_path, RECORD).step == 4
    assert find_weights(tmp_path, RECORD | {"started": 35.0}).step == 3


def test_version_0_is_the_base_model_unless_the_run_started_elsewhere(tmp_path):
    record = RECORD | {"versions": [-1, -1, 0, 0, -1, 0]}
    write_run(tmp_path, timeline=[event(0, "start")])

    assert find_weights(tmp_path, record).kind == "base"

    config = {"deployment": {}, "init_from_checkpoint": "old"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotFoundError, match="are not kept"):
        find_weights(tmp_path, record)


def test_weights_that_are_gone_are_refused_with_what_would_have_kept_them(tmp_path):
    write_run(tmp_path, timeline=[event(0, "start"), *syncs((30, 6, 3))], checkpoints=[4])

    reason = explain_refusal(tmp_path, RECORD)

    assert reason is not None
    assert "version 3 (step 6) are not kept any more: dcp_save_interval=1" in reason


@pytest.mark.parametrize(
    ("timeline", "config", "reason"),
    [
        ([], {}, "must say when version 3 was published"),
        (syncs((10, 2, 1)), {}, "must say when version 3 was published"),
        (syncs((30, 6, 3)), {"deployment": {"engine": "vllm"}}, "sampled with vLLM"),
    ],
)
def test_what_cannot_be_told_is_refused_with_its_reason(timeline, config, reason, tmp_path):
    write_run(tmp_path, timeline=timeline, config=config, checkpoints=[6])

    assert reason in (explain_refusal(tmp_path, RECORD) or "")


def test_the_exported_model_has_the_weights_of_the_last_sync(tmp_path):
    timeline = [event(0, "start"), *syncs((10, 5, 3), (20, 6, 4))]
    write_run(tmp_path, timeline=timeline, config={"output_model_id": "mine"})
    (tmp_path / "models" / "mine").mkdir(parents=True)
    (tmp_path / "models" / "mine" / "config.json").write_text("{}")

    last = find_weights(tmp_path, RECORD, 1)

    assert (last.kind, last.step, last.folder) == ("model", 6, tmp_path / "models" / "mine")
    assert explain_refusal(tmp_path, RECORD, 0) is not None
