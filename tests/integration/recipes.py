"""Forks recipes for tests, one per line of JSON on stdin; answers each line with one on stdout.

A run as a person starts it takes five seconds to import what it needs; a fork of this does not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

import transformers.models.auto.tokenization_auto  # noqa: F401 - what a run imports late
from tests.integration import rollouts

from training.recipes import distillation_loop, dpo_loop, rl_loop, sft_loop

COMMANDS = {
    "rl_loop": rl_loop.command,
    "async_rl_loop": rollouts.command,
    "sft_loop": sft_loop.command,
    "dpo_loop": dpo_loop.command,
    "distillation_loop": distillation_loop.command,
}


def main() -> None:
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
    os.environ.update(request["env"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    code: Any = 1
    try:
        code = COMMANDS[request["recipe"]](request["fork"])
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()
