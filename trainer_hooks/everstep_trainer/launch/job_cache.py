"""Keep a job's compiled code, and let standbys import in advance what the node's ranks have imported.

Trainers and compilers import much of themselves in the first step. A rank records the names of these modules after the
first step of each generation. A standby that has reached ``everstep.main`` imports them while it waits. This never runs
in the fork server, so threads that a module starts are not lost in a fork.

Only modules of the standard library and of PREIMPORT_PACKAGES are followed. They are known to import without a rank, a
process group or a device. Users' own modules are not followed: importing them may read RANK, open files or use a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType

from everstep.host.private_files import make_private_directories

log = logging.getLogger(__name__)

USED_MARKER = "used"  # a file in each folder, touched when a launcher begins to use it
UNUSED_DAYS = 30
"""After this time without a new launcher of its job, the next launcher of any job removes the folder."""


def cache_environment(state_dir: Path, name: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Make a job's folder, and return the variables by which ranks find it; empty if it cannot be made.

    The ranks of a node share it with their replacements and the next launcher of the job. Without it torch keeps
    compiled code in the system's temporary directory, in a folder whose name anybody can guess.

    Variables of torch or Triton that ``environ`` sets already stay as they are. The folder is ``cache/NAME`` in
    ``state_dir``, for this user alone (mode 0700); ``name`` is the job's, or its script's if that was generated.
    """
    folder = state_dir / "cache" / name
    try:
        make_private_directories(folder)
        found = folder.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:  # code is loaded from it
            raise PermissionError(f"{folder} is writable for another user; remove it, or set --state-dir")
        (folder / USED_MARKER).touch()
        unused_since = (folder / USED_MARKER).stat().st_mtime - UNUSED_DAYS * 86_400
        for used in folder.parent.glob(f"*/{USED_MARKER}"):
            if used.stat().st_mtime < unused_since:
                shutil.rmtree(used.parent, ignore_errors=True)
    except OSError as error:
        log.warning("compiled code and imports are not cached for this job: %s", error)
        return {}
    wanted = {
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    if "TORCHINDUCTOR_CACHE_DIR" not in environ:  # otherwise inductor's Triton cache is inside its own folder
        wanted["TRITON_CACHE_DIR"] = str(folder / "triton")
    return {CACHE_VARIABLE: str(folder), **{name: value for name, value in wanted.items() if name not in environ}}


CACHE_VARIABLE = "EVERSTEP_CACHE"
"""The environment variable that names the job's folder on this node."""
_FOLLOWED = """
    accelerate aiohttp attr certifi charset_normalizer dateutil datasets dill einops everstep everstep_trainer filelock
    fsspec httpx huggingface_hub idna jinja2 lightning lightning_fabric lightning_utilities markupsafe mpmath networkx
    numpy packaging pandas peft PIL psutil pyarrow pytorch_lightning regex requests safetensors scipy sklearn sympy timm
    tokenizers torch torchaudio torchdata torchmetrics torchvision tqdm transformers triton typing_extensions urllib3
    yaml
"""
PREIMPORT_PACKAGES = frozenset(_FOLLOWED.split())
MAX_MODULES = 20_000
"""Most names in one file; further ones are left out."""
MAX_FILE_BYTES = 4 << 20


def is_preloaded_after_import(name: str) -> bool:
    """Return whether standbys import modules of this name once a rank has."""
    package = name.partition(".")[0]
    return package in PREIMPORT_PACKAGES or package in sys.stdlib_module_names


class ImportRecorder:
    """Records the imports of one local rank, over all processes that held it.

    Each local rank has its own file in ``folder``, so that no two processes write the same one.
    """

    def __init__(self, folder: Path, local_rank: int) -> None:
        self._file = folder / f"imports-{local_rank}"
        self._known = len(sys.modules)
        self._before = frozenset(sys.modules)

    def record(self) -> None:
        """Record the modules imported since this object was made, if there are new ones."""
        if len(sys.modules) == self._known:
            return
        modules = sys.modules.copy()
        self._known = len(modules)
        new = [name for name, module in modules.items() if name not in self._before and _can_be_named(name, module)]
        names = list(dict.fromkeys([*read_imports(self._file), *new]))[:MAX_MODULES]
        aside = self._file.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # a full or missing disk costs a standby its lead, and nothing else
            aside.write_text("\n".join(names))
            aside.replace(self._file)


def read_imports(file: Path) -> list[str]:
    """Return the followed names in a file of an ImportRecorder; empty if the file is missing or too long."""
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            return []
        text = file.read_text()
    except (OSError, UnicodeDecodeError):
        return []
    return [name for name in text.split("\n")[:MAX_MODULES] if is_preloaded_after_import(name)]


class RecordedImportLoader:
    """Imports in a standby what ranks of the node have recorded in ``folder`` (None: there is none).

    Importing stops between two modules once ``is_needed`` returns True.
    """

    def __init__(self, folder: Path | None, is_needed: Callable[[], bool]) -> None:
        self._folder = folder
        self._is_needed = is_needed
        self._read: dict[Path, int] = {}

    def import_new(self) -> None:
        """Import the names that are new in the folder; skip a module that cannot be imported."""
        for name in self._new_names():
            if self._is_needed():
                return
            if name not in sys.modules:
                with contextlib.suppress(Exception, SystemExit):
                    importlib.import_module(name)

    def _new_names(self) -> Iterator[str]:
        if self._folder is None:
            return
        for file in sorted(self._folder.glob("imports-*")):
            with contextlib.suppress(OSError):
                if (written := file.stat().st_mtime_ns) != self._read.get(file) and not file.suffix:
                    self._read[file] = written
                    yield from read_imports(file)


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the job's folder on this node, or None if the launcher could not make one."""
    return Path(environ[CACHE_VARIABLE]) if environ.get(CACHE_VARIABLE) else None


def _can_be_named(name: str, module: ModuleType | None) -> bool:
    """Return whether ``import name`` gives the module; some modules are made by hand."""
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.name == name and spec.origin is not None and is_preloaded_after_import(name)
