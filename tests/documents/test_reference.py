"""The pages made from the code have all of it."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

import pytest

import hearth
from hearth.cli.verbs import VERBS
from hearth.wire.openapi import describe_platform
from training.config.recipe import RecipeConfig
from training.config.rl import RLConfig
from training.recipes import (
    async_rl_loop,
    distillation_loop,
    dpo_loop,
    igpo_loop,
    rl_loop,
    sft_loop,
)
from training.run.metric_table import METRICS

sys.path.append(str(Path(__file__).parents[2]))
from tools.reference import command, config, http, metrics


@pytest.mark.parametrize(
    "recipe", [rl_loop, async_rl_loop, igpo_loop, sft_loop, dpo_loop, distillation_loop]
)
def test_every_field_of_a_config_is_on_the_page_of_settings(recipe):
    entries = set(re.findall(r"{py:attribute} \w+\.(\w+)$", config.describe_config(), re.MULTILINE))

    missing = {field.name for field in dataclasses.fields(recipe.Config)} - entries

    assert missing == set()


def test_fields_of_parts_and_the_topics_are_those_of_the_code():
    page = config.describe_config()

    assert config.TOPICS.keys() <= {field.name for field in dataclasses.fields(RLConfig)}
    for name, part in (config.PARTS | config.OLDER).items():
        owner = {"tokenizer": sft_loop, "teacher": distillation_loop}.get(name, rl_loop)
        assert isinstance(getattr(owner.Config(), name), part)
        for setting in config.read_settings(part):
            assert f"{{py:attribute}} {name}.{setting.name}\n" in page


def test_a_setting_has_its_type_default_and_meaning():
    (rate,) = [
        setting for setting in config.read_settings(RecipeConfig) if setting.name == "learning_rate"
    ]

    meaning = "The optimizer's learning rate, before schedule and warm-up."
    assert rate == config.Setting("learning_rate", "float", "1e-05", meaning)


def test_every_metric_is_on_the_page_of_metrics():
    page = metrics.describe_metrics()

    assert [note.name for note in METRICS if f"\n`{note.name}`" not in page] == []


def test_every_route_and_record_is_on_the_page_of_http():
    page = http.describe_http()
    document = describe_platform(hearth.__version__)

    for path, methods in document["paths"].items():
        for method in methods:
            assert f"| {method.upper()} `{path}`" in page
    for name in document["components"]["schemas"]:
        assert f"### {name}\n" in page


def test_the_page_of_the_command_has_what_each_verb_prints():
    assert "--all" in command.capture_help("ps")
    assert {"quickstart", "ps", "serve"} <= VERBS.keys()
