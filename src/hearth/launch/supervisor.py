"""Runs one command, and ends all of it when the process that started it ends.

    python -I -S supervisor.py PARENT_PID EXIT_FILE COMMAND...      PARENT_PID 0: whoever started it

It imports the standard library alone, since it must start in milliseconds. It leads the process
group of all that the command starts, and passes SIGTERM on. When the command ends, it writes how to
EXIT_FILE as JSON; when the parent ends first, it ends the command. A command that is stopped
(SIGSTOP) hangs: after some seconds it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

_GRACE_S = 5.0
_POLL_S = 0.5
"""How often the parent is looked for where the system has no descriptors of processes."""
_LOOK_MS = 1000
_MOST_STOPPED = 5
"""How often in a row the command may be seen stopped."""


def main() -> None:
    """Supervise the command of ``sys.argv``."""
    parent, exit_file, argv = int(sys.argv[1]) or os.getppid(), Path(sys.argv[2]), sys.argv[3:]
    # This process ends the command; a SIGTERM to the group must not end this process first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        child = subprocess.Popen(argv, preexec_fn=_restore_sigterm)
    except OSError as error:
        _write(exit_file, {"code": 127, "signal": None, "reason": f"could not start: {error}"})
        return

    def end(_number: int, _frame: FrameType | None) -> None:
        child.terminate()

    signal.signal(signal.SIGTERM, end)
    reason = None
    try:
        has_ended = _wait_for_child(child, parent)
    except TimeoutError as error:
        has_ended, reason = True, str(error)
        child.kill()
        child.wait()
    if not has_ended:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    code = child.poll()
    if code is not None:
        peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        name = signal.Signals(-code).name if code < 0 else None
        ended = {"code": code if code >= 0 else None, "signal": name, "peak_rss_mb": peak_mb}
        facts = ended if reason is None else {**ended, "reason": reason}
        with contextlib.suppress(OSError):  # a full disk must not keep the rest from ending
            _write(exit_file, facts)
    # What the command had started goes with it, and so does this process.
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _restore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _wait_for_child(child: subprocess.Popen[bytes], parent: int) -> bool:
    """Wait until the child or the parent ends; False when that is the parent.

    Raises:
        TimeoutError: the child is stopped.
    """
    if not hasattr(os, "pidfd_open"):
        while os.getppid() == parent:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)
                return True
        return False
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        return False
    if os.getppid() != parent:  # the number is another's by now
        return False
    own = os.pidfd_open(child.pid)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(own, select.POLLIN)
    stopped = 0
    while not (ready := {descriptor for descriptor, _ in poll.poll(_LOOK_MS)}):
        # Seen by turns of this process: where it was stopped itself, nobody is accused.
        stopped = stopped + 1 if _is_stopped(child.pid) else 0
        if stopped > _MOST_STOPPED:
            raise TimeoutError(f"hung, and was killed: it was stopped for {stopped} s")
    if own in ready:
        child.wait()
        return True
    return False


def _is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP or its like; a debugger's hold is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


def _write(path: Path, facts: dict[str, object]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(facts), encoding="utf-8")
    draft.replace(path)


if __name__ == "__main__":
    main()
