"""Let standbys import in advance what the node's ranks have imported in their training functions.

Trainers and compilers import much of themselves in the first step. A rank notes the names of these modules after the
first step of each generation; a standby, whose script has come as far as ``trainer_hooks.main``, imports them while it
waits. Nothing here runs in the fork server, so threads that a module starts are not lost in a fork.

Only modules of the standard library and of PACKAGES are followed, which are known to import without a rank, a process
group or a device. Users' own modules are not: they may read RANK, open files or touch a GPU when they are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

CACHE = "EVERSTEP_CACHE"
"""The environment variable that names the job's folder on this node; ``launch/cache.py`` makes it."""
PACKAGES = frozenset(
    {
        "accelerate",
        "aiohttp",
        "attr",
        "certifi",
        "charset_normalizer",
        "dateutil",
        "datasets",
        "dill",
        "einops",
        "filelock",
        "fsspec",
        "httpx",
        "huggingface_hub",
        "idna",
        "jinja2",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "markupsafe",
        "mpmath",
        "networkx",
        "numpy",
        "packaging",
        "pandas",
        "peft",
        "PIL",
        "psutil",
        "pyarrow",
        "pytorch_lightning",
        "regex",
        "requests",
        "safetensors",
        "scipy",
        "sklearn",
        "sympy",
        "timm",
        "tokenizers",
        "torch",
        "torchaudio",
        "torchdata",
        "torchmetrics",
        "torchvision",
        "tqdm",
        "trainer_hooks",
        "transformers",
        "triton",
        "typing_extensions",
        "urllib3",
        "yaml",
    }
)
MOST = 20_000
"""Names in one file; what goes beyond is left out."""
MOST_BYTES = 4 << 20


def is_followed(name: str) -> bool:
    """Whether a standby imports a module of this name because a rank has."""
    package = name.partition(".")[0]
    return package in PACKAGES or package in sys.stdlib_module_names


class Noted:
    """The names that one local rank has noted, over all processes that had its place.

    Args:
        folder: the job's on this node.
        local_rank: whose file it is; each local rank has one, so that no two processes write the same.
    """

    def __init__(self, folder: Path, local_rank: int) -> None:
        self._file = folder / f"imports-{local_rank}"
        self._known = len(sys.modules)
        self._before = frozenset(sys.modules)

    def note(self) -> None:
        """Note what was imported since this object was made. Does nothing where there is nothing new."""
        if len(sys.modules) == self._known:
            return
        modules = sys.modules.copy()
        self._known = len(modules)
        new = [name for name, module in modules.items() if name not in self._before and _can_be_named(name, module)]
        names = list(dict.fromkeys([*read(self._file), *new]))[:MOST]
        aside = self._file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # a full or missing disk costs a standby its lead, and nothing else
            aside.write_text("\n".join(names))
            aside.replace(self._file)


def read(file: Path) -> list[str]:
    """The names in a file of ``Noted`` that are followed; none where there is no file, or one that is too long."""
    try:
        if file.stat().st_size > MOST_BYTES:
            return []
        text = file.read_text()
    except (OSError, UnicodeDecodeError):
        return []
    return [name for name in text.split("\n")[:MOST] if is_followed(name)]


class Follower:
    """A standby's side: imports what ranks of the node have noted.

    Args:
        folder: the job's on this node; None where there is none, and nothing to follow.
        wanted: whether this process is needed now: it stops between two modules.
    """

    def __init__(self, folder: Path | None, wanted: Callable[[], bool]) -> None:
        self._folder = folder
        self._wanted = wanted
        self._read: dict[Path, int] = {}

    def follow(self) -> None:
        """Import what is new in the folder. A module that cannot be imported is left to whoever needs it."""
        for name in self._new():
            if self._wanted():
                return
            if name not in sys.modules:
                with contextlib.suppress(Exception, SystemExit):
                    importlib.import_module(name)

    def _new(self) -> Iterator[str]:
        if self._folder is None:
            return
        for file in sorted(self._folder.glob("imports-*")):
            with contextlib.suppress(OSError):
                if (written := file.stat().st_mtime_ns) != self._read.get(file) and not file.suffix:
                    self._read[file] = written
                    yield from read(file)


def folder_of(environ: Mapping[str, str]) -> Path | None:
    """The job's folder on this node, where the launcher could make one."""
    return Path(environ[CACHE]) if environ.get(CACHE) else None


def _can_be_named(name: str, module: ModuleType | None) -> bool:
    """Whether ``import name`` gives the module: some are made by hand."""
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.name == name and spec.origin is not None and is_followed(name)
