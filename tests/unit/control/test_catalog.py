import json
import re

import pytest

from hearth.control.catalog import ModelEntry, read_catalog
from hearth.errors import ConfigError, NotFoundError

QWEN = "accounts/fireworks/models/qwen3-8b"
MINE = "accounts/me-too/models/mine"


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv("HEARTH_CATALOG", raising=False)


@pytest.fixture
def read(tmp_path):
    def make(text, **options):
        path = tmp_path / "catalog.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_catalog(path, **options)

    return make


def test_the_documented_models_are_there():
    catalog = read_catalog()

    assert len(catalog.models) >= 7
    model = catalog.find_model(QWEN)
    assert (model.source, model.context_length, model.moe) == ("Qwen/Qwen3-8B", 40960, False)
    assert catalog.find_model("accounts/fireworks/models/qwen3-30b-a3b").moe is True


def test_a_file_adds_to_them_and_may_replace_them(read):
    catalog = read(f'''
        [models."{MINE}"]
        source = "me/mine"
        context_length = 2048
        [models."{QWEN}"]
        source = "me/another"
        [shapes."accounts/me-too/trainingShapes/small"]
        base_model = "{MINE}"
        trainer_mode = "LORA_TRAINER"
        context_length = 512
        dtype = "bfloat16"
        micro_batch_tokens = 1024
        threads = 2
    ''')

    assert catalog.find_model(MINE) == ModelEntry(MINE, "me/mine", context_length=2048)
    assert catalog.find_model(QWEN).source == "me/another"
    assert "accounts/fireworks/models/qwen3-32b" in catalog.models
    shape = catalog.find_shape("accounts/me-too/trainingShapes/small")
    assert (shape.dtype, shape.micro_batch_tokens, shape.threads) == ("bfloat16", 1024, 2)
    version = shape.version()
    assert version.name == "accounts/me-too/trainingShapes/small/versions/1"
    assert version.snapshot.max_supported_context_length == 512
    assert version.snapshot.deployment_shape_version == (
        "accounts/me-too/deploymentShapes/small/versions/1"
    )


def test_the_variable_names_the_file_too(tmp_path, monkeypatch):
    path = tmp_path / "catalog.toml"
    path.write_text(f'[models."{MINE}"]\nsource = "me/mine"\n')
    monkeypatch.setenv("HEARTH_CATALOG", str(path))

    assert read_catalog().find_model(MINE).source == "me/mine"


def test_every_registered_model_has_a_shape_of_its_own_for_each_mode():
    catalog = read_catalog()
    shape = "accounts/fireworks/trainingShapes/qwen3-8b"

    modes = {
        suffix: catalog.find_shape(shape + suffix).trainer_mode
        for suffix in ("", "-lora", "-forward")
    }
    assert modes == {"": "POLICY_TRAINER", "-lora": "LORA_TRAINER", "-forward": "FORWARD_ONLY"}
    assert catalog.find_shape(f"{shape}/versions/1") == catalog.find_shape(shape)
    assert catalog.find_shape(shape).context_length == 40960
    assert len(catalog.list_shapes()) == len(catalog.shapes) + 3 * len(catalog.models)


def test_an_unknown_shape_lists_all_that_there_are():
    catalog = read_catalog()

    with pytest.raises(NotFoundError) as failed:
        catalog.find_shape("accounts/x/trainingShapes/none")

    for shape in catalog.list_shapes():
        assert repr(shape.name) in str(failed.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "catalog must be a TOML file"),
        (b"\xff", "catalog must be a TOML file"),
        ("[model]", "catalog must have the tables models and shapes, got ['model']"),
        ("models = 3", "catalog must have the tables models and shapes"),
        (
            '[models.mine]\nsource = "x"',
            "catalog models must be named accounts/ACCOUNT/models/NAME",
        ),
        (
            '[shapes."accounts/a/models/b"]\nbase_model = "x"',
            "catalog shapes must be named accounts/ACCOUNT/trainingShapes/NAME",
        ),
        (f'models."{MINE}" = 3', f"catalog entry '{MINE}' must have known fields"),
        (f'[models."{MINE}"]', "source must be valid"),
        (f'[models."{MINE}"]\nsource = 3', "source must be valid, got '3'"),
        (f'[models."{MINE}"]\nsource = "x"\nsize = 3', "size must be valid, got '3'"),
        (f'[models."{MINE}"]\nsource = "x"\ncontext_length = 0', "context_length must be valid"),
        (f'[models."{MINE}"]\nsource = "x"\ncontext_length = "9"', "context_length must be valid"),
        (
            f'[shapes."accounts/a/trainingShapes/b"]\nbase_model = "{MINE}"\ntrainer_mode = "X"',
            "trainer_mode must be valid, got 'X'",
        ),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused_with_its_place(read, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(text)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"catalog must be a TOML file, got .*none\.toml"):
        read_catalog(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("config", "length", "moe"),
    [
        ({"max_position_embeddings": 99}, 99, False),
        ({"num_experts": 8}, None, True),
        ({"num_local_experts": 8, "max_position_embeddings": 5}, 5, True),
        ({"n_routed_experts": 8}, None, True),
        ({}, None, False),
    ],
)
def test_a_folders_own_config_says_what_the_model_is(tmp_path, config, length, moe):
    (tmp_path / "config.json").write_text(json.dumps(config))

    model = read_catalog().find_model(str(tmp_path))

    assert (model.source, model.context_length, model.moe) == (str(tmp_path), length, moe)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"max_position_embeddings": "9"}'])
def test_a_folder_whose_config_cannot_be_read_is_a_model_all_the_same(tmp_path, content):
    (tmp_path / "config.json").write_text(content)

    assert read_catalog().find_model(str(tmp_path)).context_length is None


def test_a_hub_id_stands_for_itself():
    assert read_catalog().find_model("somebody/a-model") == ModelEntry(
        "somebody/a-model", "somebody/a-model"
    )


@pytest.mark.parametrize(
    "name",
    ["file:model", "http:evil", "s3:bucket", "owner/..", "x%2fy", "owner/a b", "owner/a\n", "-x"],
)
def test_a_name_that_is_no_hub_id_is_never_fetched(name):
    with pytest.raises(ConfigError, match="base_model must be a registered name, a folder or a"):
        read_catalog().find_model(name)


@pytest.mark.parametrize("name", ["http://169.254.169.254/x", "file:///etc/passwd", "//host/x"])
def test_a_url_is_never_fetched(name):
    with pytest.raises(ConfigError, match="base_model must be an existing folder"):
        read_catalog().find_model(name)


async def test_a_shape_is_found_with_its_versions_over_http(ask):
    path = "/v1/accounts/fireworks/trainingShapes/qwen3-8b/versions"
    query = "?filter=latest_validated%3Dtrue&pageSize=1"

    _, versions = await ask("GET", path + query)
    found = versions["trainingShapeVersions"]
    assert [version["name"] for version in found] == [path.removeprefix("/v1/") + "/1"]
    assert found[0]["snapshot"]["maxSupportedContextLength"] == 40960
    assert found[0]["snapshot"]["trainerMode"] == "POLICY_TRAINER"
    assert await ask("GET", f"{path}/1") == (200, found[0])
    assert "version must be 1" in await ask.refused(404, "GET", f"{path}/2")


async def test_all_shapes_are_listed_and_those_of_an_account(ask, plane):
    every = len(plane.context.catalog.list_shapes())

    for account, count in (("-", every), ("fireworks", every), ("nobody", 0)):
        _, versions = await ask("GET", f"/v1/accounts/{account}/trainingShapes/-/versions")
        assert len(versions["trainingShapeVersions"]) == count


async def test_a_model_says_whether_it_has_experts(ask):
    for name, moe in (("qwen3-8b", False), ("qwen3-30b-a3b", True)):
        status, model = await ask("GET", f"/v1/accounts/fireworks/models/{name}")
        assert (status, model["baseModelDetails"]["moe"]) == (200, moe)
    assert model["parameterCount"] == "30532122624"


async def test_models_are_listed_by_account(ask, plane):
    for account, count in (("-", len(plane.context.catalog.models)), ("me", 0)):
        _, listed = await ask("GET", f"/v1/accounts/{account}/models")
        assert len(listed["models"]) == count


def test_where_folders_may_not_be_named_none_is_found_under_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner/model").mkdir(parents=True)
    catalog = read_catalog(allow_folders=False)

    for name in (
        str(tmp_path),
        "owner/model",
        "owner",
        "./owner",
        "~",
        "..",
        "/etc/passwd",
        "a/b/c",
    ):
        with pytest.raises(ConfigError, match="must be a registered name or a hub id on this plat"):
            catalog.find_model(name)
        with pytest.raises(ConfigError, match=r"^tokenizer must be a registered name or a hub id"):
            catalog.check_source(name, "tokenizer")
    assert catalog.find_model("owner/other").source == "owner/other"
