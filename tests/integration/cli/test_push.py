"""``hearth push`` against a stand-in of the hub: what arrives, who sees it, what is refused."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from tests.integration.hub import TOKEN, serve_hub

from training.quickstart import MODEL

CARD = "---\nlicense: apache-2.0\n---\n# mine\n"


@pytest.fixture
def hub():
    with serve_hub() as hub:
        yield hub


@pytest.fixture
def run(tmp_path):
    """A run with two models, of which one is newer."""
    folder = tmp_path / "run"
    for age, name in ((100, "older"), (0, "final")):
        model = folder / "models" / name
        shutil.copytree(MODEL, model)
        (model / "README.md").write_text(CARD + name)
        (model / ".hidden").write_text("not for others")
        past = model.stat().st_mtime - age
        os.utime(model, (past, past))
    return folder


def push(hub, *arguments, token=TOKEN):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))
    }
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": "/nonexistent",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    }
    if token:
        environment["HF_TOKEN"] = token
    command = [sys.executable, "-m", "hearth", "push", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_the_newest_model_of_a_run_is_pushed_whole_and_private(hub, run):
    done = push(hub, run, "me/sums")

    assert done.returncode == 0, done.stderr
    found = hub.repositories["me/sums"]
    assert found["private"] is True
    assert set(found["files"]) == {
        ".gitattributes",
        "README.md",
        *(path.name for path in MODEL.iterdir()),
    }
    assert found["files"]["README.md"].decode() == CARD + "final"
    weights = (MODEL / "model.safetensors").read_bytes()
    assert found["files"]["model.safetensors"] == weights
    assert done.stdout.split()[-1] == f"{hub.url}/me/sums"


def test_what_the_hub_has_is_replaced_only_where_that_is_said(hub, run):
    assert push(hub, run, "me/sums", "--public").returncode == 0
    (run / "models" / "final" / "README.md").write_text(CARD + "again")
    (run / "models" / "final" / "chat_template.jinja").unlink()

    refused = push(hub, run, "me/sums")
    found = hub.repositories["me/sums"]
    before = found["files"]["README.md"].decode()
    replaced = push(hub, run, "me/sums", "--replace")

    assert refused.returncode == 2
    assert "name must be new, got 'me/sums', which the hub has" in refused.stderr
    assert before == CARD + "final"
    assert replaced.returncode == 0, replaced.stderr
    assert found["private"] is False
    assert found["files"]["README.md"].decode() == CARD + "again"
    assert "chat_template.jinja" not in found["files"]
    assert len(found["commits"]) == 2


REFUSED = [
    (["{run}", "sums"], TOKEN, 2, "name must be ORG/NAME, got 'sums'"),
    (["{run}/samples", "me/sums"], TOKEN, 2, "model must be a folder with a model or an adapter"),
    (["{run}", "me/sums"], "", 2, "HF_TOKEN must be set to a token that may write, got none"),
    (["{run}", "me/sums"], "hf_other", 1, "HF_TOKEN must be one that may write there"),
]


@pytest.mark.parametrize(("arguments", "token", "code", "message"), REFUSED)
def test_what_cannot_be_is_refused_in_a_line_and_nothing_is_made(
    arguments, token, code, message, hub, run
):
    done = push(hub, *(part.format(run=run) for part in arguments), token=token)

    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert hub.repositories == {}


def test_an_adapter_whose_base_is_a_folder_of_this_machine_is_pushed_with_a_warning(hub, tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    config = {"base_model_name_or_path": str(MODEL), "r": 8}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    done = push(hub, tmp_path, "me/adapter")

    assert done.returncode == 0, done.stderr
    assert "a folder of this machine: others cannot load the adapter" in done.stderr
    assert set(hub.repositories["me/adapter"]["files"]) == {
        ".gitattributes",
        "adapter_config.json",
        "adapter_model.safetensors",
    }
