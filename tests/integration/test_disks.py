"""Runs and platforms whose disk is full or read-only for a while."""

from __future__ import annotations

import subprocess

import httpx
import pytest
from tests.disks import fill, mounted, set_read_only
from tests.integration.rollouts import spread
from tests.integration.served import ACCOUNT, HEARTH, KEY, Served

from hearth.errors import HearthError
from training.quickstart import MODEL

DISK = 2**28


@pytest.mark.parametrize("free", [0, 40, 1000], ids="{} pages".format)
def test_a_run_whose_disk_is_full_names_the_file_and_goes_on_once_there_is_room(
    trial, rows, tmp_path, free
):
    common = {"rows": rows[:6], "dcp_save_interval": 1}
    whole = trial(**common, reward_fn=spread)
    scored: list[str] = []

    def fill_in_the_second_step(text, row):
        scored.append(text)
        if len(scored) == 12:
            fill(tmp_path / "disk", free)
        return spread(text, row)

    with mounted(tmp_path / "disk", DISK):
        folder = "disk/run"
        with pytest.raises(HearthError) as refused:
            trial(**common, reward_fn=fill_in_the_second_step, folder=folder)
        assert str(refused.value).startswith(str(tmp_path / folder))
        assert " must be writable, got " in str(refused.value)
        assert "No space left on device: free space on its disk; what was" in str(refused.value)
        (tmp_path / "disk/filler").unlink()
        again = trial(**common, reward_fn=spread, folder=folder)

        assert again.records() == whole.records()
        assert again.has_weights_of(whole)


def test_a_platform_whose_disk_is_full_refuses_by_name_and_goes_on_once_there_is_room(tmp_path):
    with mounted(tmp_path / "disk", DISK):
        platform = Served(tmp_path / "disk/data", trainer_threads=1, deployment_threads=1)
        try:
            with httpx.Client(base_url=platform.url, headers=KEY, timeout=60) as http:

                def create(name):
                    path = f"{ACCOUNT}/deployments?deploymentId={name}"
                    return http.post(path, json={"baseModel": str(MODEL)})

                def await_ready(name):
                    ready = {"waitForState": "READY,FAILED", "timeoutS": 50}
                    found = http.get(f"{ACCOUNT}/deployments/{name}", params=ready).json()
                    assert found["state"] == "READY", found

                def sample(name):
                    body = {"model": name, "prompt": [5, 6], "max_tokens": 4, "seed": 1}
                    answer = http.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    return answer.json()["choices"]

                create("before").raise_for_status()
                await_ready("before")
                sampled = sample("before")
                filler = fill(tmp_path / "disk")
                answers = [create(f"full-{number}") for number in range(8)]
                refused = [answer for answer in answers if not answer.is_success]
                assert refused
                for answer in refused:
                    message = answer.json()["error"]["message"]
                    assert "disk/data/control.db' must be writable, got " in message
                    assert "free space on its disk" in message
                assert sample("before") == sampled
                filler.unlink()
                create("after").raise_for_status()
                await_ready("after")
                assert sample("after") == sampled
            assert "Traceback" not in platform.log
        finally:
            platform.stop()


def test_a_read_only_data_folder_is_refused_with_what_to_do(tmp_path):
    with mounted(tmp_path / "disk", DISK):
        (tmp_path / "disk/data").mkdir()
        set_read_only(tmp_path / "disk")
        command = [HEARTH, "serve", "--port=0", f"--data-dir={tmp_path / 'disk/data'}"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ended.returncode == 2
    folder = tmp_path / "disk/data"
    assert ended.stderr.startswith(
        f"error: data_dir must be a folder of this platform: {folder} must be writable, got "
        "Read-only file system: its disk is read-only: mount it writable, or choose another folder"
    )
