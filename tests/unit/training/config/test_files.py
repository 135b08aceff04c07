from dataclasses import MISSING, fields, is_dataclass, replace

import orjson
import pytest

from hearth.errors import ConfigError
from training.config.describe import describe_settings
from training.config.files import format_settings, read_settings_file
from training.config.parts import (
    DeployConfig,
    TrainerConfig,
    WeightSyncScope,
    flatten,
    is_given,
    own_config,
    plain_config,
)
from training.recipes import (
    async_rl_loop,
    distillation_loop,
    dpo_loop,
    igpo_loop,
    rl_loop,
    sft_loop,
)

RECIPES = [rl_loop, async_rl_loop, igpo_loop, sft_loop, dpo_loop, distillation_loop]


@pytest.mark.parametrize("recipe", RECIPES)
def test_settings_are_described_from_the_source_as_python_makes_them(recipe):
    described = describe_settings(recipe.__name__)

    usual = dict(flatten(own_config(recipe.Config())))
    assert described.keys() == usual.keys()
    known = {name: setting.default for name, setting in described.items()}
    computed = {name for name, value in known.items() if value is None and usual[name] is not None}
    # Constants of other modules, enumerations and empty mappings.
    assert all(
        name.split(".")[-1].endswith(("_cap", "scope", "extras", "options", "args", "columns"))
        for name in computed
    )
    assert {name: usual[name] for name in known.keys() - computed} == {
        name: value for name, value in known.items() if name not in computed
    }


def test_a_class_of_no_file_is_refused():
    with pytest.raises(
        ValueError, match=r"module must be one with a source file, got 'nowhere\.loop'"
    ):
        describe_settings("nowhere.loop")


@pytest.fixture
def given() -> rl_loop.Config:
    return rl_loop.Config(
        base_model="models/mine",
        max_rows=7,
        lora_rank=4,
        lora_targets=["attn"],
        learning_rate=3e-5,
        shuffle=True,
        reward='odd"name:reward',
        trainer=TrainerConfig(dtype="bfloat16", micro_batch_tokens=512),
        deployment=DeployConfig(
            weight_sync_scope=WeightSyncScope.PER_DEPLOYMENT,
            engine_options={"max_model_len": 128, "quiet": True},
        ),
    )


@pytest.mark.parametrize(
    ("recipe", "name"), [(rl_loop, "deployment.engine_options"), (async_rl_loop, "rollout_extras")]
)
def test_a_mapping_is_a_flag_of_json_and_a_table_of_a_file(tmp_path, capsys, recipe, name):
    value = {"tensor_parallel_size": 2, "drain": "abort"}
    path = tmp_path / "run.toml"
    path.write_text(f'[{name}]\ntensor_parallel_size = 2\ndrain = "abort"\n')
    flag = "--" + name.replace("_", "-")
    line = name.split(".")[-1] + ' = {"tensor_parallel_size" = 2, "drain" = "abort"}\n'

    for given in ([f"@{path}"], [flag, orjson.dumps(value).decode()]):
        assert recipe.command([*given, "--base-model", "m", "--print-config"]) == 0
        assert line in capsys.readouterr().out


def write(folder, text, name="run.toml"):
    path = folder / name
    path.write_text(text)
    return path


def test_a_printed_config_gives_the_same_config_again(tmp_path, given):
    text = format_settings(given)

    assert read_settings_file(rl_loop.Config(), write(tmp_path, text)) == given
    assert "# Passes over the rows.\n# epochs = 1\n" in text
    assert "\nlora_rank = 4\n" in text
    assert not any(f"[{name}]" in text for name in ("infra", "weight_sync", "hotload"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_config_that_a_run_has_written_gives_the_same_config_again(tmp_path, recipe):
    config = recipe.Config(base_model="models/mine", epochs=3, dcp_timeout=60.0)
    path = tmp_path / "config.json"
    path.write_bytes(orjson.dumps(own_config(config), default=str))

    again = read_settings_file(recipe.Config(), path)

    assert plain_config(again) == plain_config(config)
    assert is_given(again.dcp_timeout)
    assert not is_given(again.dcp_save_interval)  # so that checkpoints are written now and then


def test_what_a_file_does_not_name_stays(tmp_path, given):
    path = write(tmp_path, "epochs = 2\ntrainer.ranks = 2\n")

    config = read_settings_file(given, path)

    assert config == replace(given, epochs=2, trainer=replace(given.trainer, ranks=2))
    for part in (field for field in fields(given) if field.default_factory is not MISSING):
        if is_dataclass(part.type):
            assert getattr(config, part.name) is not getattr(rl_loop.Config(), part.name)


def test_zero_in_a_file_of_ones_own_is_given(tmp_path):
    config = read_settings_file(rl_loop.Config(), write(tmp_path, "dcp_save_interval = 0\n"))

    assert is_given(config.dcp_save_interval)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate = 1", "lerning_rate must be a setting, .*did you mean learning_rate?"),
        ("trainer.rank = 1", r"trainer\.rank must be a setting, .*did you mean ranks?"),
        ("quux = 1", "quux must be a setting, .*--help-all lists them"),
        (
            "deployment.weight_sync_scope = 'all'",
            r"weight_sync_scope must be one of \['per_trainer'",
        ),
        ("epochs 3", "must be TOML, or JSON in a .json file"),
    ],
)
def test_a_file_that_says_no_setting_is_refused_by_name(tmp_path, text, message):
    path = write(tmp_path, text)

    with pytest.raises(ConfigError, match=message) as refused:
        read_settings_file(rl_loop.Config(), path)

    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_and_one_without_names_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"the settings file must be readable, got .*No such file"
    ):
        read_settings_file(rl_loop.Config(), tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="must have names and values, got a list"):
        read_settings_file(rl_loop.Config(), write(tmp_path, "[1]", "run.json"))


def test_a_value_of_a_wrong_type_is_found_before_a_run_begins(tmp_path):
    config = read_settings_file(rl_loop.Config(), write(tmp_path, "learning_rate = '1e-4'\n"))

    with pytest.raises(ConfigError, match="learning_rate must be a number, got '1e-4'"):
        config.validate()


def test_a_folder_is_its_own_tokenizer_and_a_registered_name_has_none():
    assert rl_loop.Config(base_model="models/x").merged_deployment.tokenizer_model == "models/x"
    registered = rl_loop.Config(base_model="accounts/me/models/x")
    assert registered.merged_deployment is registered.deployment
    named = rl_loop.Config(base_model="models/x", deployment=DeployConfig(tokenizer_model="y"))
    assert named.merged_deployment.tokenizer_model == "y"
