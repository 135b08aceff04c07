"""The GPUs of this machine, and which of a platform's processes computes on which of them.

It uses neither torch nor CUDA: a process that only launches workers needs none, and once CUDA has
been asked a process cannot be made to see fewer GPUs. The environment names the GPUs that there
are, or else the names of the devices' files do. A file that all workers of a platform share, the
board, says which process uses which GPU.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from hearth.errors import ConfigError, EngineError
from hearth.launch.records import ProcessId
from hearth.launch.spec import DeploymentSpec, TrainerSpec, WorkerSpec
from hearth.sidecars import Command

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")

Use = tuple[str, int, int]
"""A GPU, and the number and start of the process that it was given to."""


def visible_gpus(
    environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> tuple[str, ...]:
    """The names by which ``CUDA_VISIBLE_DEVICES`` may choose from what this process sees."""
    visible = environment.get(VISIBLE_VARIABLE)
    if visible is None:
        files = [path for path in devices.glob("nvidia*") if _DEVICE.fullmatch(path.name)]
        return tuple(map(str, range(len(files))))
    names = [part.strip() for part in visible.split(",")]
    # As CUDA reads it: -1, or nothing, ends the list.
    return tuple(takewhile(lambda name: name not in ("", "-1"), names))


def device_of(spec: WorkerSpec) -> str | None:
    """``cuda``, or ``cuda:N``, where the worker itself computes on a GPU if there is one."""
    # A vLLM deployment only passes requests on; its servers compute.
    if isinstance(spec, DeploymentSpec) and spec.engine == "vllm":
        return None
    device = spec.device or "cuda"
    if not device.startswith("cuda"):
        return None
    # Each rank has one of its own, whatever the number.
    return "cuda" if isinstance(spec, TrainerSpec) and spec.ranks > 1 else device


class GpuBoard:
    """Which process uses which of ``gpus``. Safe to use from several threads and processes.

    A process that has ended uses none, whatever the file says.
    """

    def __init__(self, path: Path, gpus: Sequence[str]) -> None:
        self.gpus = tuple(gpus)
        self._path = path

    def take(self, count: int, apart_from: Collection[str] = ()) -> list[str] | None:
        """The ``count`` least used GPUs, the first of the machine's where several are.

        They are this process's until it gives them back or ends. None where there are too few
        ``apart_from`` those.
        """
        with self._uses() as uses:
            used = Counter(gpu for gpu, _, _ in uses)
            others = [gpu for gpu in self.gpus if gpu not in apart_from]
            if len(others) < count:
                return None
            least_used = sorted(others, key=used.__getitem__)[:count]
            chosen = sorted(least_used, key=self.gpus.index)
            uses.extend(map(_use, chosen))
            return chosen

    def note(self, gpu: str) -> None:
        """This process uses a GPU that it has not been given."""
        with self._uses() as uses:
            uses.append(_use(gpu))

    def give_back(self, gpus: Sequence[str]) -> None:
        """Let go of GPUs, each as often as it is named."""
        with self._uses() as uses:
            for use in map(_use, gpus):
                with contextlib.suppress(ValueError):  # of a board that somebody has cleared
                    uses.remove(use)

    @contextlib.contextmanager
    def _uses(self) -> Iterator[list[Use]]:
        """The board's entries, for the body of the ``with`` to change."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.touch(mode=0o600)
        with self._path.open("r+", encoding="ascii", errors="replace") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            uses = [use for use in _read(file.read()) if ProcessId(*use[1:]).is_alive()]
            yield uses
            file.seek(0)
            file.truncate()
            json.dump(uses, file)


class WorkerGpus:
    """The GPUs of one worker: its own, and those of the processes that it starts.

    ``own`` are on the board already. No two processes of a worker share a GPU, as NCCL asks of
    ranks; different workers do where there are too few.
    """

    def __init__(self, board: GpuBoard, own: Sequence[str] = ()) -> None:
        self._board = board
        self._held = list(own)
        self._lock = threading.Lock()

    def take(self, command: Command) -> list[str]:
        """GPUs for a process of the worker's; none where it needs none or the machine has none.

        Raises:
            EngineError: the machine has fewer than the worker's processes need.
        """
        count, has = math.ceil(command.gpus), len(self._board.gpus)
        if not count or not has:
            return []
        with self._lock:
            gpus = self._board.take(count, apart_from=self._held)
            if gpus is None:
                raise EngineError(
                    f"{command.name} must have {_gpus(count)} that no other process of its worker "
                    f"has, got {has - len(self._held)} left of {has} on this machine: lower "
                    "replicas, tensor_parallel_size or ranks, or use placement='ray' on several "
                    "machines"
                )
            self._held += gpus
        return gpus

    def give_back(self, gpus: Sequence[str]) -> None:
        """Let go of what a process of the worker's had."""
        if gpus:
            with self._lock:
                for gpu in gpus:
                    self._held.remove(gpu)
                self._board.give_back(gpus)

    def close(self) -> None:
        """Let go of all."""
        self.give_back(list(self._held))


def own_gpu(board: GpuBoard, device: str | None, *, alone: bool) -> list[str]:
    """The GPU that a worker itself computes on (``device_of``), put on the board.

    A process that is ``alone`` with its worker is given the least used one and sees no other; one
    that several workers share computes on the first, or on the one that ``device`` numbers.

    Raises:
        ConfigError: there is no GPU of that number.
    """
    if device is None or not board.gpus:
        return []
    number = device.partition(":")[2]
    if number:
        if not number.isdecimal() or int(number) >= len(board.gpus):
            raise ConfigError(
                f"device must be 'cuda' or 'cuda:N' with N below {len(board.gpus)}, the GPUs that "
                f"are visible here, got {device!r}"
            )
    elif alone:
        gpus = board.take(1)
        assert gpus is not None, "there is one"
        os.environ[VISIBLE_VARIABLE] = gpus[0]
        return gpus
    gpu = board.gpus[int(number or 0)]
    board.note(gpu)
    return [gpu]


def _use(gpu: str) -> Use:
    process = ProcessId.of(os.getpid())
    assert process is not None, "this process runs"
    return gpu, process.pid, process.started


def _read(text: str) -> list[Use]:
    # A process that was killed while it wrote has left half a text.
    with contextlib.suppress(ValueError, TypeError):
        return [(str(gpu), int(pid), int(started)) for gpu, pid, started in json.loads(text)]
    return []


def _gpus(count: int) -> str:
    return "a GPU" if count == 1 else f"{count} GPUs"
