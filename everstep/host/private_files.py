"""Make files and directories that only their owner may read."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from everstep.errors import ConfigurationError, Unavailable


def write_private(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Replace a file, with mode 0600; a reader sees the whole new file or the previous one.

    Args:
        path: The file.
        content: Its new content.
        durable: The file must survive a loss of power after the return.

    Raises:
        OSError: The file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)  # of a process that was killed, perhaps with another mode
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.rename(path)
        if durable:
            _sync_directory(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def make_private_directories(path: Path) -> None:
    """Make the missing directories of a path, each with mode 0700 whatever the umask; existing ones stay as they are.

    Raises:
        OSError: A directory cannot be made, or a file of that name exists.
    """
    missing = []
    for folder in (path, *path.parents):
        if folder.exists():
            break
        missing.append(folder)
    for folder in reversed(missing):
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # another process of this user was faster
            if not folder.is_dir():
                raise
        else:
            folder.chmod(0o700)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def private_directory(path: Path, flag: str = "--run-dir") -> Path:
    """Create ``path`` and its parents as a directory that only this user may enter.

    Args:
        path: The directory.
        flag: The setting by which a person chooses another one.

    Returns:
        The directory.

    Raises:
        ConfigurationError: ``path`` or a directory above it belongs to another user.
        Unavailable: It cannot be made now.
    """
    advice = f"give another {flag}"
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if os.path.lexists(folder))
    _check_parent_owners(existing, advice)  # before anything is made in it
    try:
        make_private_directories(path)
        if path.stat().st_uid != os.geteuid():
            raise ConfigurationError(f"{path} belongs to another user: {advice}")
        _check_parent_owners(path.absolute(), advice)
        own = [folder for folder in path.absolute().parents if folder.name == f"everstep-{os.geteuid()}"]
        for folder in (path, *own):
            folder.chmod(0o700)
    except OSError as error:
        raise Unavailable(f"cannot use the directory {path}: {error.strerror}; {advice}") from error
    return path


def _check_parent_owners(path: Path, advice: str) -> None:
    """Raise ConfigurationError if another user could replace ``path``.

    The owner of a directory can replace its entries. Below a world-writable sticky directory (``/tmp``, ``/dev/shm``)
    our names can be guessed, so every component, links included, must belong to us or root.
    """
    foreign: Path | None = None
    for folder in (path, *path.parents):
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
            if foreign is not None:
                raise ConfigurationError(f"{foreign} belongs to another user: {advice}")
            return
        if found.st_uid not in (0, os.geteuid()):
            foreign = folder


def _sync_directory(directory: Path) -> None:
    """Make the names in a directory survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
