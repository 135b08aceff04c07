"""Other installed packages that have a package ``hearth`` or ``training`` of their own.

pip lets two distributions write into one folder, and Python takes the first folder of its path:
either way modules of ours are then missing, or are somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import hearth

DISTRIBUTION = "hearth-rl"
PACKAGES = ("hearth", "training")


def find_strangers(path: Iterable[str]) -> list[str]:
    """One line for each distribution in the folders of ``path`` that has a package of our names."""
    folders = {folder for folder in map(Path, path) if folder.is_dir()}
    found = sorted(file for folder in folders for file in folder.glob("*.dist-info/RECORD"))
    strangers: list[str] = []
    for record in found:
        name = record.parent.name.removesuffix(".dist-info").rpartition("-")[0]
        if name.replace("_", "-").lower() == DISTRIBUTION:
            continue
        installed = b"\n" + record.read_bytes()
        taken = [package for package in PACKAGES if f"\n{package}/".encode() in installed]
        if taken:
            strangers.append(
                f"{name} must not be installed beside {DISTRIBUTION}, got its own package "
                f"{' and '.join(taken)}: pip uninstall {name}, then "
                f"pip install --force-reinstall --no-deps {DISTRIBUTION}"
            )
    return strangers


def find_shadow() -> str:
    """Why ``import training`` would give another package than ours; empty if it gives ours."""
    ours = Path(hearth.__path__[0]).resolve().parent / "training"
    spec = find_spec("training")
    places = (
        [Path(place).resolve() for place in spec.submodule_search_locations or ()] if spec else []
    )
    if ours in places[:1]:
        return ""
    found = places[0] if places else (spec.origin if spec else "none")
    return (
        f"training must be the package beside {hearth.__path__[0]}, got {found}: uninstall or "
        "rename that one, or start hearth in another folder"
    )
