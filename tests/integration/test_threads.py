"""Processes that share a machine's cores by a file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hearth.threads import Member, ThreadBudget, refresh


@pytest.fixture
def leave_after() -> Iterator[list[Member]]:
    """Members whose work ends with the test; other tests have the threads that they had."""
    before = torch.get_num_threads()
    members: list[Member] = []
    yield members
    for member in members:
        member.note("idle")
    torch.set_num_threads(before)


OTHER = """
import sys
from pathlib import Path
from hearth.threads import ThreadBudget
import torch
member = ThreadBudget(2, Path(sys.argv[1])).add_member()
for line in sys.stdin:
    member.note(line.strip())
    print(torch.get_num_threads(), flush=True)
"""


def test_processes_share_by_a_file_and_a_dead_one_does_not_count(
    tmp_path: Path, leave_after: list[Member]
) -> None:
    board = tmp_path / "threads"
    own = ThreadBudget(2, board).add_member()
    leave_after.append(own)
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(board)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None

        other.stdin.write("sampling\n")
        assert other.stdout.readline() == "2\n"
        own.note("forward_backward")
        assert torch.get_num_threads() == 1
        other.stdin.write("sampling\n")
        assert other.stdout.readline() == "1\n"

        other.kill()
        other.wait()

    refresh()
    assert torch.get_num_threads() == 2
    assert ThreadBudget(2, board).add_member().number == 1, (
        "the dead process's record is free again"
    )


def test_a_share_can_be_looked_up_while_another_process_writes_the_board(
    tmp_path: Path, leave_after: list[Member]
) -> None:
    board = tmp_path / "threads"
    member = ThreadBudget(4, board).add_member()
    leave_after.append(member)
    member.note("forward")
    program = (
        "import sys, numpy; board = numpy.memmap(sys.argv[1], numpy.int32, 'r+', shape=(64, 2));"
        "print('writes', flush=True)\n"
        "while True: board[1:, 1] = 1; board[1:, 1] = 0"
    )
    command = [sys.executable, "-c", program, str(board)]

    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            for _ in range(100_000):
                member.take_share()
        finally:
            writer.kill()

    assert torch.get_num_threads() == 4
