"""The adapters that a client may start a policy from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hearth.errors import NotFoundError, RequestError
from hearth.sync.manifest import check_name

_PROMOTED = "accounts/me/models/"


@dataclass(frozen=True)
class AdapterStore:
    """Promoted adapters by name, and other folders if requests may name them."""

    models_dir: Path | None = None
    allow_folders: bool = True

    def find_folder(self, adapter_path: str) -> Path:
        """The folder of ``accounts/me/models/NAME``, or of a path.

        Raises:
            NotFoundError: no such adapter was promoted.
            RequestError: the name is invalid, or paths are not allowed.
        """
        if adapter_path.startswith(_PROMOTED):
            name = check_name(adapter_path.removeprefix(_PROMOTED), "adapter_path")
            if self.models_dir is None or not (self.models_dir / name).is_dir():
                raise NotFoundError(
                    f"adapter_path must name a promoted model, got {adapter_path!r}: there is none"
                )
            return self.models_dir / name
        if not self.allow_folders:
            raise RequestError(
                f"adapter_path must be {_PROMOTED}NAME on this platform, got {adapter_path!r}"
            )
        return Path(adapter_path).expanduser()
