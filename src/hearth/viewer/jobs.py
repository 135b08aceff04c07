"""Samples asked for again: each in a process of its own, a few at a time."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hearth.errors import BusyError, NotFoundError
from hearth.viewer.lines import keep_exact, parse_object

MOST_RUNNING = 2
MOST_KEPT = 100
"""Jobs whose answers are kept."""
LONGEST_S = 1800.0
_MOST_OUTPUT = 64 * 2**20
COMMAND = (sys.executable, "-m", "hearth.viewer.again")


@dataclass
class Job:
    """One process, and what became of it."""

    state: str = "running"
    text: str = "the model is loaded"
    answers: list[Any] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class SamplingJobs:
    """Starts the processes that sample again. Used on one event loop."""

    def __init__(self, command: tuple[str, ...] = COMMAND) -> None:
        self._command = command
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def start(self, folder: Path, sample: str, count: int, *, is_exact: bool) -> str:
        """Start a process; returns the job's id.

        Raises:
            BusyError: as many run as may.
        """
        running = sum(job.state == "running" for job in self._jobs.values())
        if running >= MOST_RUNNING:
            raise BusyError(
                f"at most {MOST_RUNNING} samples may be asked for again at once, got one more: "
                "wait for the others"
            )
        name, job = secrets.token_hex(8), Job()
        flags = ["--count", str(count)] + ([] if is_exact else ["--others"])
        job.task = asyncio.create_task(self._run(job, [str(folder), sample, *flags]))
        self._jobs[name] = job
        while len(self._jobs) > MOST_KEPT:
            self._jobs.popitem(last=False)
        return name

    def find(self, name: str) -> dict[str, Any]:
        """A job's state and answers.

        Raises:
            NotFoundError: there is no such job.
        """
        job = self._jobs.get(name)
        if job is None:
            raise NotFoundError(f"job must be one that was started here, got {name[:80]!r}")
        return {"state": job.state, "text": job.text, "answers": job.answers}

    async def close(self) -> None:
        """End all processes."""
        tasks = [job.task for job in self._jobs.values() if job.task and not job.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, job: Job, arguments: list[str]) -> None:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MOST_OUTPUT,
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), LONGEST_S)
        except TimeoutError:
            job.state, job.text = "failed", f"it took longer than {LONGEST_S:.0f} s"
            return
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        lines = output.strip().splitlines()
        answer = parse_object(lines[-1]) if lines else None
        if process.returncode == 0 and answer is not None:
            answers = answer.get("answers")
            job.answers = keep_exact(answers) if isinstance(answers, list) else []
            job.state, job.text = "done", str(answer.get("text", ""))
        else:
            said = errors.decode(errors="replace").strip().splitlines()
            job.state = "failed"
            job.text = said[-1][:2000] if said else f"it ended with code {process.returncode}"
