"""Our own pages: their Python blocks run in order, one namespace a page, on a served platform."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.documents import extraction
from tests.documents.blocks import read_blocks
from tests.modules import load_module

from hearth.records.table import SCHEMA
from training.data.rows import load_rows
from training.quickstart import MODEL, TRAIN_ROWS

REPOSITORY = Path(__file__).resolve().parents[2]
TINKER_PAGE = REPOSITORY / "docs" / "tinker.md"
DOCS = REPOSITORY / "docs"
SOURCES = REPOSITORY / "src"
ALL_PAGES = [REPOSITORY / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES = [
    page
    for page in ALL_PAGES
    if page != TINKER_PAGE
    and any(block.language == "python" for block in read_blocks(page.read_text()))
]
SHELL = ("sh", "bash", "console")
EXAMPLE = DOCS / "examples" / "own_loop.py"
STAND_INS = {
    '"Qwen/Qwen3-0.6B"': json.dumps(str(MODEL)),
    '"gsm8k.jsonl"': '"rows.jsonl"',
    "TRAIN_ROWS), 512)": "TRAIN_ROWS), 16)",
}
"""What the pages say, and what stands for it here: a small model, few rows."""


@pytest.fixture(scope="module")
def run_page(platform):
    """Run a page's blocks once, in the working folder, which has a few rows."""
    rows = load_rows(str(TRAIN_ROWS), 8)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    @functools.cache
    def run(path: Path) -> dict:
        names: dict = {"__name__": path.stem}
        for snippet in extraction.Document.read(path).snippets:
            code = snippet.text
            for said, ours in STAND_INS.items():
                code = code.replace(said, ours)
            extraction.execute(code, names)
        return names

    return run


def test_every_block_of_code_is_run_or_says_why_not():
    for page in ALL_PAGES:
        for block in read_blocks(page.read_text()):
            where = f"{page.relative_to(REPOSITORY)}:{block.line}"
            match block.language:
                case "python" | "pandas" | "datasets" | "diff" | "text" | "":
                    assert block.reason is None, f"{where} is run by a test, or is no code"
                case "json":
                    json.loads(block.text)
                case "toml":
                    tomllib.loads(block.text)
                case "yaml":
                    yaml.safe_load(block.text)
                case language:
                    assert language in SHELL, f"{where}: nothing runs {language}"


def test_commands_of_the_pages_run_where_they_do_not_say_why_not(platform):
    commands = [
        block.text
        for page in ALL_PAGES
        for block in read_blocks(page.read_text())
        if block.language in SHELL and block.reason is None
    ]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    assert commands
    for command in commands:
        done = subprocess.run(
            ["bash", "-euc", command], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"


def test_every_message_of_the_page_on_troubles_is_one_of_the_code():
    headings = re.findall(r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    texts = {text for path in SOURCES.rglob("*.py") for text in read_texts(path)}

    assert len(headings) > 25
    for heading in headings:
        parts = [re.escape(part.strip()) for part in heading.split("...") if part.strip()]
        pattern = re.compile(".*".join(parts), re.DOTALL)
        assert any(pattern.search(text) for text in texts), heading


def read_texts(path: Path) -> Iterator[str]:
    """The texts of a source file; what is put into one stands there as a question mark."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "?" for part in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(REPOSITORY)) for path in PAGES])
def test_the_python_blocks_of_our_pages_run_and_leave_nothing_running(path, run_page, platform):
    run_page(path)

    states, replicas = platform.states()
    assert set(states) <= {"JOB_STATE_CANCELLED"}
    assert set(replicas) <= {0}


def test_the_page_on_tinker_runs_in_a_program_of_its_own(tmp_path):
    # The official client leaves connections open.
    (snippet,) = extraction.Document.read(TINKER_PAGE).snippets
    script = tmp_path / "page.py"
    script.write_text(snippet.text)

    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )

    assert done.returncode == 0, done.stderr[-3000:]
    loss, logprobs = done.stdout.splitlines()[-2:]
    assert float(loss) > 0
    assert logprobs.startswith("[None, -")


def test_the_page_on_weight_sync_publishes_bases_and_deltas(run_page, platform):
    names = run_page(REPOSITORY / "docs" / "weight_sync.md")

    trainers = platform.trainers()
    rows = trainers.list_checkpoints(names["infra"].policy_job_id)
    trainers.close()
    kinds = {str(row.name).rsplit("/", 1)[-1]: row.checkpoint_type for row in rows}
    order = [names[name] for name in ("first", "second", "kept", "served", "again")]
    assert list(kinds) == order
    base, delta = "CHECKPOINT_TYPE_INFERENCE_BASE", "CHECKPOINT_TYPE_INFERENCE_ARC_V2"
    assert list(kinds.values()) == [base, delta, base, base, base]
    assert names["completion"].snapshot_identity == names["second"]
    assert names["syncer"].version == 4
    assert f"still serves {names['served']!r}" in names["refusal"]


def test_the_page_on_loops_trains_and_promotes(run_page):
    names = run_page(REPOSITORY / "docs" / "your_own_loop.md")

    assert names["result"].metrics["samples:sum"] == len(names["completions"]) > 0
    assert names["loaded"].metadata == {"row": 8}
    assert (Path(names["model"].source) / "model.safetensors").exists()


@pytest.mark.parametrize("program", ["pandas", "datasets"])
def test_other_programs_open_samples_as_the_page_on_samples_says(program, run_page):
    pytest.importorskip(program, reason="an extra of the reader's own")
    page = REPOSITORY / "docs" / "samples.md"
    (snippet,) = re.findall(
        rf"^```{program}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
    )

    exec(snippet, names := dict(run_page(page)))

    assert len(names["best" if program == "pandas" else "answers"]) > 0


def test_the_page_on_samples_has_every_column_in_its_order():
    text = (REPOSITORY / "docs" / "samples.md").read_text()
    table = text.split("## Columns")[1].split("The footer")[0]

    rows = re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == SCHEMA.names


def test_the_page_on_samples_finds_every_sample(run_page):
    names = run_page(REPOSITORY / "docs" / "samples.md")

    counts = {outcome: count for outcome, count, _, _ in names["rows"]}
    assert sum(counts.values()) == 8 * 4
    assert counts["trained"] == names["trained"] > 0
    assert names["first"]["text"] in names["written"]


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/reliability.md"])
def test_every_test_that_a_page_names_exists(page):
    text = (REPOSITORY / page).read_text()

    named = re.findall(r"`([\w/]+\.py)::(\w+)`", text)
    assert len(named) > 10
    for file, name in named:
        assert f"def {name}(" in (REPOSITORY / "tests" / file).read_text(), f"{file}::{name}"


def test_the_async_page_says_to_pin_the_version():
    text = " ".join((REPOSITORY / "docs" / "async_rl.md").read_text().split())

    assert "It is experimental: pin the version that you build on." in text


def test_the_example_trains_on_the_served_platform(platform, capsys):
    module = load_module(EXAMPLE)

    rewards = module.main()

    assert len(rewards) == module.STEPS
    assert "accounts/me/models/own-loop" in capsys.readouterr().out
    states, replicas = platform.states()
    assert set(states) == {"JOB_STATE_CANCELLED"}
    assert set(replicas) <= {0}  # its own is deleted; other pages leave theirs


def test_the_example_runs_with_nothing_set_up(monkeypatch, tmp_path):
    for name in ("HEARTH_URL", "HEARTH_API_KEY", "FIREWORKS_BASE_URL", "FIREWORKS_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step ") == 4
    (model,) = tmp_path.glob("own-loop-*/models/own-loop/model.safetensors")
    assert model.stat().st_size > 0
