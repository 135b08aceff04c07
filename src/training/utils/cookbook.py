"""The helper that the product documents import of ``tinker_cookbook``, where that is not installed.

Hearth installs no package of that name: it and the real one would overwrite each other's files.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

_NAME = "tinker_cookbook"
_FOLDER = Path(__file__).with_name(_NAME)


class _CookbookFinder(MetaPathFinder):
    """Finds the folder of this name beside this file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME:
            return None
        places = [str(_FOLDER)]
        return spec_from_file_location(
            fullname, _FOLDER / "__init__.py", submodule_search_locations=places
        )


def offer_cookbook() -> None:
    """Let ``import tinker_cookbook`` find ours from now on where no other finder finds one."""
    sys.meta_path.append(_CookbookFinder())
