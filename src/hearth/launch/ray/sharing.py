"""Whether a folder is the same on each node that is used: a file is written here and read there."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from hearth.errors import ConfigError

_PROBE = ".shared-with-every-node"
_VISIBLE_S = 5.0
"""How long a network file system may take to show a new file."""


@dataclass(frozen=True)
class Probe:
    """A file with a text that nobody else knows."""

    folder: str
    text: str

    def check(self, node: str, *, patience_s: float = _VISIBLE_S) -> None:
        """Look for the file from ``node``.

        Raises:
            ConfigError: it is not there.
        """
        end_s = time.monotonic() + patience_s
        while self._read() != self.text:
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"data_dir must be a folder that all nodes share, got {self.folder!r}, which "
                    f"{node} does not see: mount it there under the same path, or set "
                    "snapshot_store='ray'"
                )
            time.sleep(0.05)

    def _read(self) -> str | None:
        try:
            return (Path(self.folder) / _PROBE).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return None


def write_probe(folder: Path) -> Probe:
    """The probe of ``folder``, which is made where it is missing.

    One that is there stays: workers of an earlier platform still look for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _PROBE
    if not path.exists():
        path.write_text(secrets.token_hex(16), encoding="ascii")
    return Probe(str(folder), path.read_text(encoding="ascii"))
