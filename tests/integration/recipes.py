"""Forks recipes and `hearth` for tests, one per line of JSON on stdin; a line on stdout answers.

A run as a person starts it takes five seconds to import what it needs; a fork of this does not.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any, NoReturn

import transformers.models.auto.tokenization_auto  # noqa: F401 - what a run imports late
from tests.integration import rollouts

from hearth.cli import main as hearth
from hearth.launch.processes import WORKER_MODULES
from training.recipes import distillation_loop, dpo_loop, rl_loop, sft_loop

COMMANDS = {
    "hearth": hearth.main,
    "rl_loop": rl_loop.command,
    "async_rl_loop": rollouts.command,
    "sft_loop": sft_loop.command,
    "dpo_loop": dpo_loop.command,
    "distillation_loop": distillation_loop.command,
}


def main() -> None:
    # An embedded platform imports them late.
    for name in ("hearth.local", *WORKER_MODULES):
        importlib.import_module(name)
    children: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "fork" in request:
            pid = os.fork()
            if pid == 0:
                run(request)
            # The system gives numbers of ended processes again.
            children.pop(pid, None)
            answer: Any = pid
        else:
            pid = request["status"]
            if pid not in children:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children[pid] = os.waitstatus_to_exitcode(status)
            answer = children.get(pid)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def run(request: dict[str, Any]) -> NoReturn:
    """The recipe's command, in the child."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    for descriptor, path in ((1, request["out"]), (2, request["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
    if request["folder"] is not None:
        # As `python -m` does.
        os.chdir(request["folder"])
        sys.path.insert(0, request["folder"])
    code: Any = 1
    try:
        code = COMMANDS[request["fork"]](request["arguments"])
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
