"""The viewer's page in a real Chromium: each view, its URL, its keys, and data that attacks it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from selenium.webdriver.common.keys import Keys
from tests.integration.viewer import made_up
from tests.integration.viewer.chromium import Page, missing_programs
from tests.waiting import wait_until

MINUS = "\u2212"
BYTES = "\u2039d9\u203a"
"""How a byte of the first Arabic letter is shown."""
SERVE = "import sys; from hearth.viewer.verb import view; sys.exit(view(sys.argv[1:]))"

pytestmark = pytest.mark.skipif(
    bool(missing_programs()),
    reason=f"needs {' and '.join(missing_programs())} (Debian: chromium-driver)",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    made_up.write_run(folder / "plain")
    made_up.write_run(folder / "sweep" / "other", shift=0.1, policy_loss="dapo", seed=1)
    made_up.write_hostile_run(folder / "hostile")
    made_up.begin(folder / "growing")
    made_up.append_step(folder / "growing", 1)
    bare = folder / "bare"
    bare.mkdir()
    made_up.append(bare / "metrics.jsonl", {"type": "train", "step": 1, "rollout/reward": 0.5})
    return folder


@pytest.fixture(scope="module")
def page(runs: Path) -> Iterator[Page]:
    command = [sys.executable, "-c", SERVE, str(runs), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(
            match[0] for line in server.stdout if (match := re.search(r"http://\S+key=\S+", line))
        )
        opened = Page(url)
        try:
            yield opened
        finally:
            opened.close()
            server.terminate()


@pytest.fixture(autouse=True)
def console_is_silent(page: Page) -> Iterator[None]:
    page.problems()
    yield
    assert page.problems() == []
    assert page.ask("return window.PWNED === undefined")


VIEWS = {
    "/runs": ("plain", "sweep/other", "growing", "0.600", "ended", "running"),
    "/run/plain/curves": ("Reward", "Held-out accuracy", "0.600", "checkpoint|weight sync"),
    "/run/plain/time": ("sampler", "forward backward", "wait"),
    "/run/plain/samples": ("105 of 105", "The sum of 23 and 12", "stale"),
    "/run/plain/group/train.4": (
        "Group 4",
        "What is 4 + 3?",
        "The sum of 4 and 3 is 10",
        "Truth: 7",
    ),
    "/run/plain/prompts": ("9 prompts",),
    "/run/plain/prompt/train.3": ("Row 3", "4 times", "Step 11"),
    "/run/plain/sample/train.3.4.2.0": ("What is 4 + 3?", "The sum of 4 and 3 is 9.", "3002"),
    "/run/plain/sample/train.3.4.2.0?view=tokens": ("Token", f"{MINUS}0.75000", "version 2"),
    "/run/plain/sample/train.3.4.2.0?view=again": ("Ask again", "original"),
    "/run/plain/config": ("policy_loss", "grpo"),
    "/compare?runs=plain,sweep~other,plain": (
        "parts at step 1; its samples at step 5, token 57",
        "does not part",
        "Settings that differ",
    ),
    "/run/bare/samples": ("This run has no samples on record",),
    "/run/nowhere/curves": ("nowhere",),
    "/nowhere": ("There is no such page",),
}


@pytest.mark.parametrize("path", VIEWS)
def test_each_view_shows_its_data_at_every_width_in_both_themes(page: Page, path: str) -> None:
    for width, scheme in ((900, "light"), (2500, "dark"), (1440, "light")):
        page.resize(width, 900)
        page.prefer(scheme)
        page.open(path)
        for text in VIEWS[path]:
            page.wait(
                "return new RegExp(arguments[0]).test(document.body.innerText)",
                text if "|" in text else re.escape(text),
            )
        assert page.ask("return document.documentElement.scrollWidth <= innerWidth")
        if path == "/run/nowhere/curves":
            wait_until(lambda: any("404" in problem for problem in page.problems()))


def test_a_filtered_table_is_restored_from_its_url(page: Page) -> None:
    page.open("/run/plain/samples")
    page.wait_for_text("105 of 105")
    page.press("/")
    page.write("and 7 is")
    page.wait_for_text("8 of 105")
    page.click("input[type=checkbox]")  # outcome: trained
    page.wait_for_text("4 of 105")
    page.click(".table-head .number:nth-child(5) button")  # by reward
    page.wait_for_path(
        "/run/plain/samples?search=and+7+is&outcome=trained&sort=reward&descending=1"
    )
    page.wait(
        "return document.querySelector('[aria-sort=descending]')?.innerText.includes('Reward')"
        " && document.querySelector('.table-row')?.innerText.includes('1.000')"
    )
    before = page.texts(".table-row")
    page.open(page.path)
    page.wait_for_text("4 of 105")
    page.wait_for_texts(".table-row", before)
    assert page.texts(".table-row mark") == ["and 7 is"] * 4
    assert page.ask("return document.querySelector('input[type=search]').value") == "and 7 is"


def test_samples_are_ordered_by_a_number_that_has_no_column_of_its_own(page: Page) -> None:
    first = "document.querySelector('.table-row')?.innerText.trim().split(/\\s/)[0]"
    for name, title, direction, step in (
        ("started", "Started", "ascending", "1"),
        ("started", "Started", "descending", "12"),
        ("score_s", "Scoring, s", "descending", "1"),
    ):
        descending = int(direction == "descending")
        page.open(f"/run/plain/samples?sort={name}&descending={descending}")
        head = f"document.querySelector('[aria-sort={direction}]')?.innerText.includes('{title}')"
        page.wait(f"return {head} && {first} === '{step}'")


def test_a_regular_expression_that_is_none_is_explained(page: Page) -> None:
    page.open("/run/plain/samples?regex=sum%20of%20%28")
    page.wait("return document.querySelector('[role=alert]')?.innerText")
    wait_until(lambda: any("400" in problem for problem in page.problems()))
    page.open("/run/plain/samples?regex=is%20%5Cd%2B%5C.%24&in=text")
    page.wait("return document.querySelector('.table-row mark')?.innerText.startsWith('is ')")


def test_keys_alone_lead_from_the_table_of_runs_to_a_token(page: Page) -> None:
    page.open("/runs?sort=name&descending=0")
    page.wait_for_text("sweep/other")
    page.press(*"jjj", Keys.ENTER)
    page.wait_for_path("/run/plain/curves")
    page.press("3")
    page.wait_for_text("105 of 105")
    page.press(*"jjjjj", Keys.ENTER)
    page.wait_for_path("/run/plain/sample/train.12.22.2.0")
    page.wait_for_text("assistant")
    page.press("j")
    page.wait_for_path("/run/plain/sample/train.12.22.3.0")
    page.press("v")
    first = page.wait("return document.querySelector('.token.cursor')?.dataset.token")
    page.press(Keys.ARROW_RIGHT)
    page.wait(
        "return document.querySelector('.token.cursor').dataset.token === arguments[0]",
        str(int(first) + 1),
    )
    page.wait_for_path(f"/run/plain/sample/train.12.22.3.0?view=tokens&token={int(first) + 1}")
    page.press("?")
    page.wait_for_text("Next answer of the group")
    page.press(Keys.ESCAPE)
    page.wait("return !document.querySelector('[role=dialog]')")
    page.press("g")
    page.wait_for_path("/run/plain/group/train.22")


def test_chosen_runs_are_compared_and_the_page_names_where_they_part(page: Page) -> None:
    page.open("/runs?sort=name&descending=0")
    page.wait_for_text("sweep/other")
    page.press(*"jjjxjx")
    page.wait_for_text("2 chosen")
    page.press("v")
    page.wait_for_path("/compare?runs=plain,")
    page.wait_for_text("policy_loss")
    page.wait(
        "return /parts at step 1; its samples at step 5, token \\d+/.test(document.body.innerText)"
    )
    # A chart is drawn once it is in sight.
    page.wait(
        "window.scrollTo(0, document.body.scrollHeight);"
        "return document.querySelectorAll('.uplot canvas').length > 0"
    )


def test_a_prompt_is_walked_through_time(page: Page) -> None:
    page.open("/run/plain/prompt/train.3")
    page.wait_for(".step-line.cursor", "step 11")
    page.press("k", "k")
    page.wait_for(".step-line.cursor", "step 5")
    page.wait_for_path("/run/plain/prompt/train.3?step=5&index=9")
    page.wait_for_text("The sum of 9 and 5 is 17.")
    page.open("/run/plain/prompt/train.3?step=2")
    page.wait_for_text("The sum of 3 and 2 is 5.")


def test_a_click_on_a_curve_opens_the_samples_of_its_step(page: Page) -> None:
    page.open("/run/plain/curves?zoom=2~12")
    page.click(".u-over")  # its middle
    page.wait_for_path("/run/plain/samples?step_min=7&step_max=7")
    page.wait_for_text("8 of 105")


def test_steps_in_time_are_shown_from_their_url_and_moved_by_keys(page: Page) -> None:
    page.open("/run/plain/time?from=5&to=6&color=work")
    page.wait("return document.querySelector('canvas.lanes')?.width > 500")
    page.wait_for("tbody tr", "forward backward")
    page.press(Keys.ARROW_LEFT)
    page.wait_for_path("/run/plain/time?from=4&to=5&color=work")
    page.press("-")
    page.wait_for_path("/run/plain/time?from=3&to=6&color=work")


def test_behind_the_last_group_the_page_says_so_and_leads_back(page: Page) -> None:
    page.open("/run/plain/group/train.23")
    page.wait_for_text("The sum of 23 and 12 is 35.")
    page.press("n")
    page.wait_for("[role=alert]", "train.24")
    page.press("b")
    page.wait_for_text("The sum of 23 and 12 is 35.")
    wait_until(lambda: any("404" in problem for problem in page.problems()))


def test_the_token_view_is_exact(page: Page) -> None:
    page.open("/run/plain/sample/train.3.4.2.0?view=tokens&color=behavior")
    page.wait("return document.querySelector('.token')")
    expected = made_up.make_sample("train", 3, 4, 2, made_up.answer(3, 4, 2, 0.0))
    shown = "".join(page.texts(".token")).replace("·", " ").replace("⏎", "\n")
    assert shown == expected["prompt"] + expected["text"] + made_up.END
    assert page.texts(".token.special")[-1] == made_up.END
    assert page.ask("return document.querySelectorAll('.token.clipped').length") == 1
    assert (
        page.ask("return document.querySelectorAll('.token.given').length")
        == expected["prompt_len"]
    )
    painted = (
        "return [...document.querySelectorAll('.token')].filter(e => e.style.background).length"
    )
    assert page.ask(painted) == expected["length"]


def test_a_token_that_is_no_text_shows_its_bytes(page: Page) -> None:
    page.open("/run/hostile/sample/train.1.0.4.0?view=tokens")  # Arabic, a byte a token
    page.wait("return document.querySelector('.token.bytes')?.innerText === arguments[0]", BYTES)


def test_36000_tokens_are_on_the_page_line_by_line(page: Page) -> None:
    page.open("/run/hostile/sample/train.1.2.0.0?view=tokens")
    page.wait("return document.querySelector('.token')")
    assert page.ask("return document.querySelectorAll('.token').length") < 10_000
    page.press(Keys.END)
    count = page.wait("return Number(document.querySelector('.token.cursor')?.dataset.token)")
    assert count > 36_000
    page.wait(
        "return document.querySelector('.token.cursor').innerText === arguments[0]", made_up.END
    )


HOSTILE_VIEWS = (
    *("curves", "curves?search=script", "time", "samples", "samples?search=script", "config"),
    *("sample/train.1.4.0.0", "sample/train.1.4.0.0?view=tokens", "group/train.4"),
    *("group/train.0", "prompts", "prompt/train.0", "sample/train.1.0.5.0"),
    *(f"sample/train.1.0.{place}.0?view=conversation" for place in (0, 1, 2, 3, 7)),
    *(f"sample/train.1.0.{place}.0?view=tokens" for place in (0, 1, 2, 3, 7)),
)
RAW_CONTROLS = (
    r"/[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/"
    ".test(document.body.textContent)"
)


@pytest.mark.parametrize("view", HOSTILE_VIEWS)
def test_hostile_data_is_shown_and_neither_runs_nor_breaks_the_layout(
    page: Page, view: str
) -> None:
    page.open(f"/run/hostile/{view}")
    page.wait("return document.querySelector('main')?.innerText.length > 20")
    page.wait("return !document.querySelector('[aria-busy=true], .ghost')")
    assert page.ask("return document.documentElement.scrollWidth <= innerWidth")
    assert page.ask("return document.querySelectorAll('img, iframe, object').length") == 0
    assert page.ask("return document.querySelectorAll('script:not([src])').length") == 0
    assert not page.ask(f"return {RAW_CONTROLS}")


def test_controls_are_shown_as_marks_and_a_long_line_is_cut(page: Page) -> None:
    page.open("/run/hostile/group/train.0")
    page.wait_for_text("U+202E")
    marks = page.texts(".mark")
    assert {"ESC", "BEL", "NUL", "U+202E", "U+2066", "U+200B", "CR", "U+FEFF"} <= set(marks)
    assert any(re.fullmatch(r"U\+0489 .\d+", mark) for mark in marks)
    page.wait_for_text("more characters")
    assert len(page.text) < 100_000


def test_a_new_step_shows_up_by_itself(page: Page, runs: Path) -> None:
    page.open("/run/growing/samples")
    page.wait_for_text("8 of 8")
    page.wait("return document.querySelector('.link-state.on')")
    made_up.append_step(runs / "growing", 2)
    page.wait_for_text("16 of 16")
    page.open("/run/growing/curves")
    page.wait_for_text("0.100")
    page.wait("return document.querySelector('.link-state.on')")
    made_up.append_step(runs / "growing", 3)
    page.wait_for_text("0.150")


def test_the_theme_is_kept(page: Page) -> None:
    page.prefer("light")
    page.open("/runs")
    background = "return getComputedStyle(document.body).backgroundColor"
    page.wait_for_text("plain")
    light = page.ask(background)
    page.press("t", "t")  # light, dark
    page.wait(f"{background} !== arguments[0]", light)
    page.open("/runs")
    page.wait_for_text("plain")
    assert page.ask(background) != light
    page.press("t")
    page.wait(f"{background} === arguments[0]", light)


def test_what_is_filtered_is_exported(page: Page) -> None:
    page.open("/run/plain/samples?step_min=3&step_max=3")
    page.wait_for_text("8 of 105")
    links = page.ask(
        "return [...document.querySelectorAll('.menu a')].map(link => link.getAttribute('href'))"
    )
    fetched = "return fetch(arguments[0]).then(answer => answer.text())"
    table = page.ask(fetched, links[0])
    assert table.count("The sum of") == 8
    report = page.ask(fetched, f"/api/runs/plain/report?what=sample&id={quote('train.3.4.2.0')}")
    assert "train.3.4.2.0" in report
