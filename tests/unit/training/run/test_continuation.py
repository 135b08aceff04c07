"""What counts as the same run, without one: the settings that are compared, and the rows."""

import dataclasses
import re
from pathlib import Path

import pytest

from hearth.errors import ConfigError
from training.recipes import (
    async_rl_loop,
    distillation_loop,
    dpo_loop,
    igpo_loop,
    rl_loop,
    sft_loop,
)
from training.run.continuation import (
    FIXED,
    FREE,
    TrainedOn,
    check_continuation,
    describe_training,
    hash_rows,
    write_trained_on,
)
from training.utils import WeightSyncConfig

PAGE = Path(__file__).parents[4] / "docs" / "resuming.md"
RECIPES = (rl_loop, async_rl_loop, igpo_loop, sft_loop, dpo_loop, distillation_loop)
FIELDS = {field.name for recipe in RECIPES for field in dataclasses.fields(recipe.Config)}


def test_the_page_lists_the_settings_that_may_differ():
    table = PAGE.read_text().split("## Settings that may differ")[1]
    cells = [line.split("|")[2] for line in table.splitlines() if line.startswith("| w")]
    named = set(re.findall(r"`(\w+)`", " ".join(cells))) - {"weight_sync_interval"}

    assert named == FREE


def test_every_name_is_a_setting_of_a_recipe():
    assert FREE <= FIELDS
    assert FIXED - {"rows"} <= FIELDS


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_not_free_is_compared(recipe):
    settings = describe_training(recipe.Config(), ()).settings

    compared = {name.split(".")[0] for name in settings}
    fields = {field.name for field in dataclasses.fields(recipe.Config)}
    assert fields - FREE <= compared
    part = {"deployment"} if recipe not in (sft_loop, dpo_loop) else set()
    assert compared & FREE == {"trainer"} | part


def test_two_spellings_of_one_setting_are_the_same():
    newest = describe_training(rl_loop.Config(weight_sync_interval=4), ())
    older = WeightSyncConfig(weight_sync_interval=4)
    assert describe_training(rl_loop.Config(weight_sync=older), ()) == newest


def test_the_hash_of_rows_sees_content_and_order_and_not_the_order_of_keys():
    first, second = {"messages": [1], "ground_truth": "a"}, {"messages": [2]}

    assert hash_rows([first, second]) == hash_rows([dict(reversed(first.items())), second])
    others = ([second, first], [first], [first | {"ground_truth": "b"}, second], [])
    assert len({hash_rows([first, second]), *map(hash_rows, others)}) == 5
    assert hash_rows([{"tool": object()}]) == hash_rows([{"tool": object()}])
    # Rows given in Python may hold what a faster JSON refuses.
    assert hash_rows([{"ground_truth": 10**40}]) != hash_rows([{"ground_truth": 10**41}])
    assert hash_rows([{"text": "\ud800"}]) != hash_rows([{"text": "\ud801"}])


def test_a_setting_that_an_older_version_did_not_have_counts_as_its_default(tmp_path):
    now = describe_training(rl_loop.Config(), ())
    older = {name: value for name, value in now.settings.items() if name != "eps_clip"}
    write_trained_on(tmp_path, TrainedOn(older, now.num_rows, now.rows_sha256))

    check_continuation(tmp_path, rl_loop.Config(), now, ())
    changed = rl_loop.Config(eps_clip=0.5)
    with pytest.raises(ConfigError, match=r"eps_clip: 0\.2 then, 0\.5 now"):
        check_continuation(tmp_path, changed, describe_training(changed, ()), ())


def test_a_config_of_ones_own_may_have_required_settings(tmp_path):
    @dataclasses.dataclass(kw_only=True)
    class OwnConfig(rl_loop.Config):
        difficulty: int

    now = describe_training(OwnConfig(difficulty=1), ())
    write_trained_on(tmp_path, now)

    check_continuation(tmp_path, OwnConfig(difficulty=1), now, ())
    harder = OwnConfig(difficulty=2)
    with pytest.raises(ConfigError, match="difficulty: 1 then, 2 now"):
        check_continuation(tmp_path, harder, describe_training(harder, ()), ())


def test_the_modes_of_resume_are_checked():
    with pytest.raises(ConfigError, match=r"resume.mode must be one of"):
        rl_loop.Config(resume="always").validate()
