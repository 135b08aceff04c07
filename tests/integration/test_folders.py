from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hearth.sync.folders import write_draft


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_killed_writers_draft_is_swept_by_the_next(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys\n"
        "from hearth.sync.folders import write_draft\n"
        "with write_draft(pathlib.Path(sys.argv[1])) as draft:\n"
        "    (draft / 'half').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], check=False)
    assert killed.returncode == -9
    assert [name[:9] for name in names(tmp_path)] == [".draft-a-"]

    with write_draft(tmp_path / "b") as draft:
        (draft / "text").touch()

    assert names(tmp_path) == ["b"]
