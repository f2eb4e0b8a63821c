"""Storage of checkpoints: a directory, or a URL that fsspec reaches (an object store)."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from everstep.errors import ConfigurationError
from everstep.layout.object_storage import filesystem_of


def open_target(url: str) -> StorageTarget:
    """Return the target that ``url`` names (a path, ``file://``, or an fsspec URL). Raises ConfigurationError."""
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        path = Path(url2pathname(parts.path) if parts.scheme else url)
        if not path.is_absolute():
            raise ConfigurationError(f"checkpoints cannot be written to {url!r}: use an absolute path, or a URL")
        return DirectoryTarget(path)
    try:
        filesystem, path_of = filesystem_of(url)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"checkpoints cannot be written to {url!r}: {error}; install fsspec (the [agent] extra) and its package "
            f"for {parts.scheme}://, or obstore, on every node"
        ) from error
    return ObjectStoreTarget(filesystem, path_of)


class DirectoryTarget:
    """A directory of a shared or local file system. Names have parts joined by ``/``; all methods may raise OSError."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def get(self, name: str) -> bytes | None:
        """Return a small file, or None if there is none."""
        with suppress(FileNotFoundError):
            return (self._root / name).read_bytes()
        return None

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with draft.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        _sync_folder(path.parent)

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            return (self._root / name).stat().st_size
        return None

    def written_at(self, name: str) -> float | None:
        """Return the time a file was written, in unix seconds, or None if there is none."""
        with suppress(FileNotFoundError):
            return (self._root / name).stat().st_mtime
        return None

    def open_for_writing(self, name: str) -> DirectoryFile:
        """Open a large file to be written from front to back."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return DirectoryFile(path)

    def folders(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(self._root) if entry.is_dir(follow_symlinks=False))
        return []

    def remove(self, name: str) -> None:
        """Remove a file or a whole folder; a missing one is no error."""
        path = self._root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, onerror=_ignore_missing)
        else:
            path.unlink(missing_ok=True)


class DirectoryFile:
    """A file whose ``existing_bytes`` an earlier writer left, to be compared with ``read`` before ``append``."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        self._folder = path.parent
        self.existing_bytes = os.fstat(descriptor).st_size

    def read(self, length: int) -> bytes:
        return self._file.read(length)

    def truncate(self, length: int) -> None:
        """Keep only the first ``length`` existing bytes; ``append`` continues there."""
        self._file.truncate(length)
        self._file.seek(length)

    def append(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def finish(self) -> None:
        """Complete the file and make it durable."""
        with self._file:
            os.fsync(self._file.fileno())
        _sync_folder(self._folder)

    def close_unfinished(self) -> None:
        """Close an unfinished file; bytes that a later writer can continue from stay."""
        self._file.close()


def _ignore_missing(_: object, path: str, error: tuple[Any, BaseException, Any]) -> None:
    """Ignore missing files: vaults that finish a version at the same time prune the same files."""
    if not isinstance(error[1], FileNotFoundError):
        raise error[1]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ObjectStoreTarget:
    """An fsspec target. An object exists once it was put; after a crash the next writer starts its file again."""

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs = filesystem
        self._root = root.rstrip("/")

    def get(self, name: str) -> bytes | None:
        with suppress(FileNotFoundError):
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))
        return None

    def put(self, name: str, data: bytes) -> None:
        self._make_folder(name)
        self._fs.pipe_file(f"{self._root}/{name}", data)

    def size(self, name: str) -> int | None:
        with suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            return int(self._fs.info(f"{self._root}/{name}")["size"])
        return None

    def written_at(self, name: str) -> float | None:
        with suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            return float(self._fs.modified(f"{self._root}/{name}").timestamp())
        return None

    def open_for_writing(self, name: str) -> ObjectStoreFile:
        self._make_folder(name)
        return ObjectStoreFile(self._fs, f"{self._root}/{name}")

    def folders(self) -> list[str]:
        with suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            listed = self._fs.ls(self._root, detail=True)
            return sorted(i["name"].rstrip("/").rpartition("/")[2] for i in listed if i["type"] == "directory")
        return []

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{name}", recursive=True)

    def _make_folder(self, name: str) -> None:
        """Make the parent folder: object stores ignore this, file systems behind fsspec need it."""
        self._fs.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)


class ObjectStoreFile:
    """A new object; nothing of an earlier writer can be continued."""

    existing_bytes = 0

    def __init__(self, filesystem: Any, path: str) -> None:
        self._file = filesystem.open(path, "wb")

    def read(self, length: int) -> bytes:
        return b""

    def truncate(self, length: int) -> None:
        assert length == 0

    def append(self, data: bytes | memoryview) -> None:
        self._file.write(bytes(data))

    def finish(self) -> None:
        self._file.close()

    def close_unfinished(self) -> None:
        """Discard the unfinished file (closing would store it), or close it: no record names it, so it is harmless."""
        from fsspec.spec import AbstractBufferedFile

        if not isinstance(self._file, AbstractBufferedFile):
            self._file.close()
            return
        try:
            self._file.discard()
        finally:
            self._file.closed = True  # otherwise garbage collection would close, and so store, the file


StorageTarget = DirectoryTarget | ObjectStoreTarget
SequentialFile = DirectoryFile | ObjectStoreFile
