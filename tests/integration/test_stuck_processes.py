"""Processes whose threads are stuck end all the same."""

import subprocess
import sys
import time

HANGING = """
import asyncio, time
from training.rollouts.daemon_threads import DaemonThreads

async def main():
    asyncio.get_running_loop().set_default_executor(DaemonThreads("test"))
    try:
        await asyncio.wait_for(asyncio.to_thread(time.sleep, 3600), 0.1)
    except TimeoutError:
        print("given up", flush=True)

asyncio.run(main())
"""

STUCK = """
import time
from pathlib import Path
from training.run.watchdog import StallLimits, Watchdog

def score():
    time.sleep(120)  # stuck in C

limits = StallLimits(0.3, grace_s=0.3)
with Watchdog(limits, lambda: "the reward computes", log_path=Path.cwd(), on_stall=print):
    score()
"""


def test_neither_a_loop_nor_the_process_waits_for_a_call_that_hangs():
    done = subprocess.run(
        [sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=30, check=False
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "given up\n", "")


def test_a_process_whose_main_thread_is_stuck_exits_with_a_report_of_the_line(tmp_path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    begun = time.monotonic()

    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    report = (tmp_path / "stall.txt").read_text()
    assert done.returncode == 1
    assert time.monotonic() - begun < 50
    assert f'File "{script}", line 7, in score' in report
    for text in (report, done.stderr):
        assert "time.sleep(120)  # stuck in C" in text
        assert "the reward computes" in text
    assert "has not ended 0.3 s after its stall: the process exits" in done.stderr
    assert "see " + str(tmp_path / "stall.txt") in done.stdout
