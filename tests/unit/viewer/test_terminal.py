import asyncio
import json

import pytest
from textual.widgets import DataTable, Input, Static

from hearth.records.layout import SAMPLES, VOCABULARY, name_file
from hearth.records.table import make_table, write_samples, write_vocabulary
from hearth.viewer.library import Library
from hearth.viewer.terminal.app import TerminalViewer
from hearth.viewer.terminal.curves import CurvesScreen
from hearth.viewer.terminal.drawing import clean, plot, shade_logprob, shade_signed
from hearth.viewer.terminal.samples import SamplesScreen, parse_filter
from hearth.viewer.terminal.tokens import SampleScreen, draw_tokens

pytestmark = pytest.mark.slow

HOSTILE = "\x1b[31mred\x07\x9b2J\u202eback\u2028[bold]markup[/bold]\x00"
TOKENS = [b"Q", b"\xe2", b"\x82", b"\n", b"yes", HOSTILE.encode(), b"no", b"<|end|>"]


def write_metrics(folder, steps):
    records = [{"type": "train", "step": step, "rollout/reward": step / 10} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(folder, steps=4):
    """A run with two samples in each step."""
    (folder / SAMPLES).mkdir(parents=True)
    write_metrics(folder, range(1, steps + 1))
    write_vocabulary(folder / SAMPLES / VOCABULARY, list(TOKENS), {7}, "run")
    for step in range(1, steps + 1):
        write_step(folder, step)
    return folder


def write_step(folder, step):
    texts = [f"yes {step}", HOSTILE]
    columns = {
        "kind": ["train"] * 2,
        "step": [step] * 2,
        "index": [step] * 2,
        "row": [step] * 2,
        "completion": [0, 1],
        "segment": [0, 0],
        "tokens": [[0, 3, 4, 7], [0, 1, 2, 5]],
        "prompt_len": [2, 1],
        "loss_mask": [[False, False, True, True], [False, True, True, True]],
        "behavior_logprobs": [[float("nan")] * 2 + [-0.01, -5.0], [float("nan"), -1.0, -1, -2]],
        "versions": [[-1, -1, step, step], [-1, step, step, step]],
        "reward": [float(step), 0.0],
        "outcome": ["trained", "uniform"],
        "finish_reason": ["stop", HOSTILE],
        "length": [2, 3],
        "text": texts,
        "prompt": ["Q", HOSTILE],
    }
    write_samples(folder / SAMPLES / name_file("train", step), [make_table(columns)], "run")


def lines(app):
    """What the terminal shows now."""
    return [strip.text for strip in app.screen._compositor.render_strips()]


def cells(app, column):
    table = app.screen.query_one(DataTable)
    return [table.get_row_at(row)[column].plain for row in range(table.row_count)]


async def wait_for(pilot, is_true):
    """Until what the terminal shows is so."""
    async with asyncio.timeout(60):
        while not is_true():
            await pilot.pause(0.02)


async def wait_for_screen(pilot, kind):
    await wait_for(pilot, lambda: isinstance(pilot.app.screen, kind))
    await pilot.pause()


async def test_runs_are_a_table_from_which_each_is_opened(tmp_path):
    for name in ("first", "second"):
        write_run(tmp_path / name)

    async with TerminalViewer(Library([tmp_path])).run_test(size=(100, 35)) as pilot:
        await wait_for(pilot, lambda: cells(pilot.app, 0) == ["first", "second"])
        assert cells(pilot.app, 2) == ["4", "4"]
        assert cells(pilot.app, 4) == ["0.400", "0.400"]
        await pilot.press("down", "enter")
        await wait_for_screen(pilot, CurvesScreen)
        assert pilot.app.screen.run_shown.name == "second"
        await pilot.press("escape")
        assert cells(pilot.app, 0) == ["first", "second"]


async def test_curves_are_listed_drawn_searched_and_read_on(tmp_path):
    run = write_run(tmp_path / "run")

    async with TerminalViewer(Library([run])).run_test(size=(100, 35)) as pilot:
        await wait_for_screen(pilot, CurvesScreen)
        assert cells(pilot.app, 0) == ["rollout/reward"]
        assert [cells(pilot.app, column)[0] for column in (1, 2, 3)] == ["0.4", "0.1", "0.4"]
        drawn = [line.strip() for line in lines(pilot.app) if line.strip().startswith("0.4 ")]
        assert drawn
        assert drawn[0][-1] == "⠉"
        write_metrics(run, range(1, 8))
        await wait_for(pilot, lambda: cells(pilot.app, 1) == ["0.7"])
        await pilot.press("slash", *"nothing")
        await wait_for(pilot, lambda: cells(pilot.app, 0) == [])
        assert any("no such name" in line for line in lines(pilot.app))


async def test_samples_are_filtered_sorted_and_come_while_the_run_goes_on(tmp_path):
    run = write_run(tmp_path / "run")

    async with TerminalViewer(Library([run])).run_test(size=(120, 35)) as pilot:
        await wait_for_screen(pilot, CurvesScreen)
        await pilot.press("s")
        await wait_for(pilot, lambda: isinstance(pilot.app.screen, SamplesScreen))
        await wait_for(
            pilot, lambda: cells(pilot.app, 1) == ["4", "4", "3", "3", "2", "2", "1", "1"]
        )
        await pilot.press("slash", *"yes reward_min=2", "enter")
        await wait_for(pilot, lambda: cells(pilot.app, 1) == ["4", "3", "2"])
        await pilot.press("o", "r")
        await wait_for(pilot, lambda: cells(pilot.app, 4) == ["2.000", "3.000", "4.000"])
        write_step(run, 5)
        await wait_for(pilot, lambda: cells(pilot.app, 1) == ["2", "3", "4", "5"])
        await pilot.press("slash", *"reward_min=much", "enter")
        title = pilot.app.screen.query_one(".title", Static)
        await wait_for(pilot, lambda: "reward_min must be" in str(title.render()))
        await pilot.press("slash", "escape")
        assert not isinstance(pilot.app.focused, Input)
        assert isinstance(pilot.app.screen, SamplesScreen)


async def test_a_sample_shows_its_tokens_and_its_neighbors_in_the_group(tmp_path):
    run = write_run(tmp_path / "run", steps=1)

    async with TerminalViewer(Library([run])).run_test(size=(100, 35)) as pilot:
        await wait_for_screen(pilot, CurvesScreen)
        await pilot.press("s")
        await wait_for(pilot, lambda: isinstance(pilot.app.screen, SamplesScreen))
        await wait_for(pilot, lambda: len(cells(pilot.app, 1)) == 2)
        await pilot.press("enter")
        await wait_for_screen(pilot, SampleScreen)
        await wait_for(pilot, lambda: any("train.1.1.0.0" in line for line in lines(pilot.app)))
        assert any("yes<|end|>" in line for line in lines(pilot.app))
        await pilot.press("right_square_bracket")
        await wait_for(pilot, lambda: any("train.1.1.1.0" in line for line in lines(pilot.app)))
        assert any("<e2><82>" in line for line in lines(pilot.app))
        await pilot.press("c")
        await wait_for(pilot, lambda: any("weight version" in line for line in lines(pilot.app)))
        await pilot.press("left_square_bracket")
        await wait_for(pilot, lambda: any("train.1.1.0.0" in line for line in lines(pilot.app)))


async def test_nothing_of_a_model_reaches_the_terminal_raw(tmp_path):
    run = write_run(tmp_path / "[bold]run\x1b[31m", steps=1)
    (run / "config.json").write_text(json.dumps({"policy_loss": HOSTILE, "base_model": HOSTILE}))

    async with TerminalViewer(Library([run])).run_test(size=(200, 35)) as pilot:
        await wait_for_screen(pilot, CurvesScreen)
        shown = lines(pilot.app)
        await pilot.press("escape")
        shown += lines(pilot.app)
        await pilot.press("enter")
        await wait_for_screen(pilot, CurvesScreen)
        await pilot.press("s")
        await wait_for(pilot, lambda: isinstance(pilot.app.screen, SamplesScreen))
        await wait_for(pilot, lambda: len(cells(pilot.app, 1)) == 2)
        shown += lines(pilot.app)
        await pilot.press("down", "enter")
        await wait_for_screen(pilot, SampleScreen)
        await wait_for(pilot, lambda: any("train.1.1.1.0" in line for line in lines(pilot.app)))
        shown += lines(pilot.app)

    assert all(character.isprintable() for line in shown for character in line)
    # Markup is shown as it is written.
    assert sum("[bold]markup[/bold]" in line for line in shown) >= 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[2Jb", "a\ufffd[2Jb"),
        ("a\nb\tc", "a⏎b c"),
        ("\u202eabc\u200b", "\ufffdabc\ufffd"),
        ("e\u0301\u0301\u0301", "e"),
        ("Grüße, 世界", "Grüße, 世界"),
        ("\x9b31m\x7f\x00\ud800", "\ufffd31m\ufffd\ufffd\ufffd"),
    ],
)
def test_what_a_terminal_acts_on_is_replaced(text, shown):
    assert clean(text) == shown


def test_a_curve_rises_from_the_lowest_to_the_highest_dot():
    assert plot([0.0, 1.0, 2.0, 3.0], 2, 1) == ["⡠⠊"]
    assert plot([1.0, 1.0], 2, 1) == ["⠤⠤"]
    assert plot([], 2, 2) == ["⠀⠀", "⠀⠀"]
    assert plot([0.0, float("nan"), 1.0], 3, 1)[0].count("⠀") >= 1
    assert plot(list(range(1000)), 2, 1) == ["⡠⠊"]


def test_colors_are_stronger_the_more_improbable_or_larger_a_number_is():
    assert not shade_logprob(-0.05).bgcolor
    reds = [shade_logprob(value).bgcolor.triplet.red for value in (-1.0, -3.0, -6.0, -50.0)]
    assert reds == sorted(reds)
    assert reds[2] == reds[3] == 176
    blue, orange = (shade_signed(value, 2.0).bgcolor.triplet for value in (2.0, -2.0))
    assert blue.blue > blue.red
    assert orange.red > orange.blue
    assert not shade_signed(0.0, 0.0).bgcolor


def test_a_filter_is_of_conditions_and_words():
    assert parse_filter('the answer reward_min=0.5 kind=eval regex="a b" a=b') == {
        "search": "the answer a=b",
        "reward_min": "0.5",
        "kind": "eval",
        "regex": "a b",
    }


def test_a_very_long_sample_is_cut_and_says_so():
    count = 20_010
    content = {
        "tokens": {"texts": ["x"] * count, "bytes": [None] * count, "special": []},
        "mask": [True] * count,
        "values": {},
    }

    drawn = draw_tokens(content, "none").plain

    assert drawn.startswith("x" * 20_000 + "\n")
    assert "10 more tokens" in drawn
