import pytest

from hearth.errors import ConfigError, NotFoundError

BASE = "accounts/fireworks/models/tiny"
SHAPE = "accounts/fireworks/trainingShapes/tiny"


def version(name="1", mode="POLICY_TRAINER", model=None, created="2026-01-01", shape="tiny"):
    return {
        "name": f"accounts/fireworks/trainingShapes/{shape}/versions/{name}",
        "createTime": created,
        "snapshot": {
            "trainerMode": mode,
            "baseModel": model,
            "maxSupportedContextLength": 2048,
            "deploymentShapeVersion": "accounts/fireworks/deploymentShapes/tiny/versions/1",
            "trainerShardingScheme": {"pipelineParallelism": 2},
        },
    }


def test_a_shapes_profile_is_its_newest_validated_version(peer, answer, manager):
    peer.on("GET", f"/v1/{SHAPE}/versions", answer({"trainingShapeVersions": [version("7")]}))

    profile = manager.resolve_training_profile(SHAPE)

    assert peer.requests("GET", f"/v1/{SHAPE}/versions")[0].query == {
        "filter": "latest_validated=true",
        "pageSize": "1",
    }
    assert profile.training_shape_version == f"{SHAPE}/versions/7"
    assert profile.training_shape_id == SHAPE
    assert profile.max_supported_context_length == 2048
    assert profile.deployment_shape_version.endswith("/deploymentShapes/tiny/versions/1")
    assert profile.pipeline_parallelism == 2


def test_a_shapes_version_may_be_named(peer, answer, manager):
    peer.on("GET", f"/v1/{SHAPE}/versions/3", answer(version("3")))

    profile = manager.resolve_training_profile(f"{SHAPE}/versions/3")

    assert profile.training_shape_version == f"{SHAPE}/versions/3"


def test_a_shape_without_a_validated_version_is_not_found(peer, answer, manager):
    peer.on("GET", f"/v1/{SHAPE}/versions", answer({"trainingShapeVersions": []}))

    with pytest.raises(NotFoundError, match="validated version"):
        manager.resolve_training_profile(SHAPE)


@pytest.mark.parametrize("name", ["tiny", "accounts/x/deploymentShapes/y", f"{SHAPE}/revisions/1"])
def test_what_is_no_shapes_name_is_refused(manager, name):
    with pytest.raises(ConfigError, match="accounts/<account>/trainingShapes"):
        manager.resolve_training_profile(name)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ({}, "own/versions/1"),
        ({"lora_rank": 8}, "lora/versions/2"),
        ({"forward_only": True}, "forward/versions/1"),
        ({"lora_rank": 8, "forward_only": True}, "forward/versions/1"),
    ],
)
def test_a_shape_is_chosen_by_mode_then_model_then_age(peer, answer, manager, asked, chosen):
    rows = [
        version("9", shape="any", created="2026-09-01"),
        version("1", shape="own", model=BASE),
        version("8", shape="other", model="accounts/x/models/y", created="2026-09-01"),
        version("1", "LORA_TRAINER", shape="lora"),
        version("2", "LORA_TRAINER", shape="lora", created="2026-02-01"),
        version("1", "FORWARD_ONLY", shape="forward"),
    ]
    pages = [
        answer({"trainingShapeVersions": rows[:3], "nextPageToken": "n"}),
        answer({"trainingShapeVersions": rows[3:]}),
    ]
    peer.on("GET", "/v1/accounts/-/trainingShapes/-/versions", *pages)

    profile = manager.auto_select_training_shape(BASE, **asked)

    assert profile.training_shape_version.endswith(chosen)


@pytest.mark.parametrize(
    ("rows", "lora_rank", "message"),
    [
        ([version(model="accounts/x/models/y")] * 3, 0, "none of this model among 3"),
        ([version("1", "FORWARD_ONLY")], 8, r"as LORA_TRAINER, got .*tiny.*FORWARD_ONLY"),
    ],
    ids=["others are counted", "its own are listed"],
)
def test_without_a_fitting_shape_the_error_says_what_there_is(
    peer, answer, manager, rows, lora_rank, message
):
    found = answer({"trainingShapeVersions": rows})
    peer.on("GET", "/v1/accounts/-/trainingShapes/-/versions", found)

    with pytest.raises(NotFoundError, match=message):
        manager.auto_select_training_shape(BASE, lora_rank=lora_rank)
