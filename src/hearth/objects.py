"""A folder of an object store (``s3://bucket/prefix``), whose objects appear whole. No torch."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hearth.errors import ConfigError, StorageError

SCHEME = "s3://"
SERVED = "_served"
"""Beside the buckets, whose names cannot begin so: which snapshot each deployment serves."""


def check_store(snapshot_store: str, placement: str) -> None:
    """Refuse a ``snapshot_store`` that there is not, or that the placement would ignore.

    Raises:
        ConfigError: it is neither ``folder`` nor ``ray`` nor a URL, or a URL with ``inline``.
    """
    is_url = snapshot_store.startswith(SCHEME)
    if not is_url and snapshot_store not in ("folder", "ray"):
        raise ConfigError(
            f"snapshot_store must be 'folder', 'ray' or s3://BUCKET/PREFIX, got {snapshot_store!r}"
        )
    if is_url and placement == "inline":
        raise ConfigError(
            f"snapshot_store must be 'folder' with placement 'inline', got {snapshot_store!r}: "
            "snapshots stay in memory there; choose placement 'process' or 'ray'"
        )


@dataclass(frozen=True)
class ObjectFacts:
    """One object of a listing."""

    num_bytes: int
    tag: str
    """Another one once the object was written again."""


class ObjectFolder:
    """The objects under a URL, by their paths below it. Safe to use from several threads.

    Credentials and the endpoint are those of every AWS client: its environment variables, its
    files, or the machine's role.

    Raises:
        ConfigError: the URL names no bucket, or ``s3fs`` is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._root = self.url.removeprefix(SCHEME)
        if not self.url.startswith(SCHEME) or not self._root.partition("/")[0]:
            raise ConfigError(f"snapshot_store must be a URL like s3://bucket/prefix, got {url!r}")
        try:
            import s3fs
        except ImportError:
            raise ConfigError(
                f"snapshot_store must be a store that an installed package reads, got {url!r}: "
                "pip install 'hearth-rl[s3]'"
            ) from None
        # Other processes write as well: nothing that was listed once is kept.
        self._files: Any = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)

    def check(self) -> None:
        """Write and read an object.

        Raises:
            StorageError: the bucket does not exist, or this machine may not use it.
        """
        self.write("_probe", b"hearth")
        try:
            self.read("_probe")
        except FileNotFoundError as error:
            raise self._refuse(error) from None

    def list(self, path: str = "") -> dict[str, ObjectFacts]:
        """The objects below a path, by their own paths below the URL.

        Raises:
            StorageError: the store does not answer, or refuses.
        """
        with self._explain():
            found = self._files.find(self._place(path), detail=True)
        return {
            place.removeprefix(f"{self._root}/"): ObjectFacts(facts["size"], facts["ETag"])
            for place, facts in found.items()
        }

    def read(self, path: str) -> bytes:
        """An object's content.

        Raises:
            FileNotFoundError: there is none.
            StorageError: the store does not answer, or refuses.
        """
        with self._explain():
            return self._files.cat_file(self._place(path))

    def write(self, path: str, content: bytes) -> None:
        """Write an object, or replace it.

        Raises:
            StorageError: the store does not answer, or refuses.
        """
        with self._explain(is_write=True):
            self._files.pipe_file(self._place(path), content)

    def upload(self, file: Path, path: str) -> None:
        """Write a file's content as an object; errors are those of ``write``."""
        with self._explain(is_write=True):
            self._files.put_file(str(file), self._place(path))

    def download(self, path: str, file: Path) -> None:
        """Write an object's content into a file; errors are those of ``read``."""
        with self._explain():
            self._files.get_file(self._place(path), str(file))

    def remove(self, path: str) -> None:
        """Remove an object and all below its path; nothing is done where there is none."""
        listed = sorted(self.list(path))
        with self._explain(), contextlib.suppress(FileNotFoundError):
            if listed:
                self._files.rm([self._place(found) for found in listed])

    def _place(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _refuse(self, error: Exception) -> StorageError:
        return StorageError(
            f"snapshot_store must be a bucket that this machine may use, got {self.url}: "
            f"{str(error) or type(error).__name__}: set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY "
            "and, for a store that is not Amazon's, AWS_ENDPOINT_URL"
        )

    @contextlib.contextmanager
    def _explain(self, *, is_write: bool = False) -> Generator[None, None, None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except FileNotFoundError as error:
            if is_write:
                raise self._refuse(error) from None
            raise
        except (OSError, BotoCoreError, ClientError) as error:
            raise self._refuse(error) from None
