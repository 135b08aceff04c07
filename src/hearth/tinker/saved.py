"""Saved weights: their ``tinker://`` paths, who may use them, when they expire."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable
from typing import Any, Literal

from hearth.control.resource_names import format_timestamp
from hearth.control.store import Records, StoredRecord
from hearth.errors import ConflictError, NotFoundError, RequestError
from hearth.tinker.bases import Bases
from hearth.tinker.records import SavedFacts

logger = logging.getLogger(__name__)

_PATH = re.compile(r"tinker://([^/]+)/(weights|sampler_weights|external_weights)/([^/]+)")
_NAME = re.compile(r"[A-Za-z0-9_.-][A-Za-z0-9_.:=+-]{0,127}")
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
Kind = Literal["weights", "sampler_weights", "external_weights"]


class SavedWeights:
    """All saved weights of a platform. Its methods block: call them on a thread.

    A snapshot whose weights are deleted stays while ``is_sampled`` says that it is in use.
    """

    def __init__(self, records: Records, bases: Bases, is_sampled: Callable[[str], bool]) -> None:
        self._records = records
        self._is_sampled = is_sampled
        self._bases = bases

    def put(self, facts: SavedFacts) -> None:
        """Keep saved weights, in the place of earlier ones of the path."""
        before = self._records.find(facts.path)
        if before is None:
            self._records.insert(facts.path, "SAVED", facts.as_dict())
            return
        self._records.update(facts.path, state="SAVED", body=facts.as_dict())
        replaced = SavedFacts.from_dict(before.body)
        if replaced.identity != facts.identity:
            self._remove_files(replaced)

    def is_taken(self, run_id: str, kind: Kind, name: str) -> bool:
        """Whether a run has saved weights of that name."""
        return self._records.find(f"tinker://{run_id}/{kind}/{name}") is not None

    def find(self, path: str, owner: str) -> SavedFacts:
        """The saved weights of a path, if they are the owner's or published.

        Raises:
            RequestError: it is no such path.
            NotFoundError: there are none for this owner, or they have expired.
        """
        return SavedFacts.from_dict(self._find(path, owner, may_be_public=True).body)

    def list_own(self, owner: str, run_id: str | None = None) -> list[dict[str, Any]]:
        """An owner's, newest first, as clients read them; of one run, or of all."""
        self.remove_expired()
        found: list[dict[str, Any]] = []
        for record in reversed(self._records.list_all()):
            facts = SavedFacts.from_dict(record.body)
            if facts.owner == owner and run_id in (None, facts.run_id):
                found.append(_describe(facts, record.created_s))
        return found

    def change(self, path: str, owner: str, **values: Any) -> None:
        """Publish them, take that back, or set when they expire; raises as ``find``."""
        record = self._find(path, owner, may_be_public=False)
        facts = SavedFacts.from_dict(record.body).model_copy(update=values)
        self._records.update(record.id, body=facts.as_dict())

    def set_ttl(self, path: str, owner: str, seconds: int | None) -> None:
        """Have them expire so many seconds from now, or never; raises as ``find``."""
        self.change(path, owner, expires_s=None if seconds is None else time.time() + seconds)

    def delete(self, path: str, owner: str) -> None:
        """Drop them; raises as ``find``."""
        record = self._find(path, owner, may_be_public=False)
        self._records.delete(record.id)
        self._remove_files(SavedFacts.from_dict(record.body))

    def remove_expired(self) -> None:
        """Drop what has expired."""
        now_s = time.time()
        for record in self._records.list_all():
            facts = SavedFacts.from_dict(record.body)
            if facts.expires_s is not None and facts.expires_s <= now_s:
                logger.info("%s has expired", facts.path)
                self._records.delete(record.id)
                self._remove_files(facts)

    def _find(self, path: str, owner: str, *, may_be_public: bool) -> StoredRecord:
        if not _PATH.fullmatch(path):
            raise RequestError(
                "path must be tinker://RUN/KIND/NAME with weights, sampler_weights or "
                f"external_weights as KIND, got {path[:200]!r}"
            )
        record = self._records.find(path)
        facts = None if record is None else SavedFacts.from_dict(record.body)
        if (
            record is None
            or facts is None
            or not (facts.owner == owner or (may_be_public and facts.is_public))
            or (facts.expires_s is not None and facts.expires_s <= time.time())
        ):
            raise NotFoundError(
                f"path must name saved weights of this key, got {path[:200]!r}: there are none"
            )
        return record

    def _remove_files(self, facts: SavedFacts) -> None:
        base = self._bases.find(facts.base_model)
        if facts.kind == "weights":
            base.remove_checkpoint(facts.identity)
        elif facts.kind == "sampler_weights":
            if not self._is_sampled(facts.identity):
                base.remove_snapshot(facts.identity)
        else:
            shutil.rmtree(base.export_folder(facts.identity), ignore_errors=True)


def check_name(name: str) -> str:
    """``name``, when weights can be saved under it.

    Raises:
        RequestError: it has other characters, or too many.
    """
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise RequestError(
            f"path must be a name of at most 128 letters, digits and '_.:=+-', got {name[:160]!r}"
        )
    return name


def taken_error(name: str) -> ConflictError:
    """The error for a name that is taken."""
    return ConflictError(f"path must be new, got {name!r}: save with overwrite, or choose another")


def _describe(facts: SavedFacts, created_s: float) -> dict[str, Any]:
    described: dict[str, Any] = {
        "checkpoint_id": f"{facts.kind}/{facts.name}",
        "checkpoint_type": _TYPES[facts.kind],
        "time": format_timestamp(created_s),
        "tinker_path": facts.path,
        "size_bytes": facts.size_bytes,
        "public": facts.is_public,
        "user_metadata": facts.user_metadata,
    }
    if facts.expires_s is not None:
        described["expires_at"] = format_timestamp(facts.expires_s)
    return described
