"""What the zygote imports, so that no fork server and no worker has to.

Everything here is imported lazily by ordinary training code at its first step, or its first failure; in a fresh
process that is where a replacement loses its seconds. Importing them together takes about 1.5 s and 310 MB once;
a child forked afterwards shares the pages and starts in 5 to 10 ms.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterable, Mapping

PRELOAD = "EVERSTEP_PRELOAD"
"""The environment variable with the modules of ``--preload``, separated by commas."""
MODULES = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.tensor.experimental",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.optim",  # DistributedDataParallel looks for it
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.optim",
    "torch._dynamo",  # the first optimizer.step() imports it: 0.3 to 2 s
    "torch.utils.data",
    "torch.utils.checkpoint",
    "torch.profiler._cupti_monitor",  # the first backward imports it
    "encodings.idna",  # the first look-up of a host's name imports it: 2 ms
    "xxhash",
    "trainer_hooks.entry",  # trainer_hooks.main and what it takes
)


def preload(modules: Iterable[str] = MODULES) -> None:
    """Imports ``modules`` and takes all that is there out of the garbage collector's sight.

    Frozen objects are never walked, so a collection in a child does not touch (and thereby copy) the shared pages.
    Raises ImportError for a missing package; a package's modules may be missing, since they differ between versions.
    Asserts that CUDA stays untouched: a context does not survive a fork.
    """
    gc.disable()
    for name in modules:
        _import_if_there(name)
    cuda = sys.modules.get("torch.cuda")
    assert cuda is None or not cuda.is_initialized(), "an import initialized CUDA; forked workers could not use it"
    gc.freeze()  # with what garbage the imports left, 2 % of it: collecting that takes 0.3 s and returns no page


def preload_named(environ: Mapping[str, str] = os.environ) -> None:
    """Import what ``--preload`` names, so that ranks and standbys share it. Call it before ``preload``.

    Raises SystemExit, with what to do, for a module that cannot be imported, that starts a Python thread or that
    initializes CUDA: neither a thread nor a CUDA context survives the fork of a rank.
    """
    for name in filter(None, environ.get(PRELOAD, "").split(",")):
        threads = threading.active_count()
        try:
            importlib.import_module(name)
        except Exception as error:
            raise SystemExit(f"everstep-launch: --preload {name}: it cannot be imported here: {error!r}") from error
        cuda = sys.modules.get("torch.cuda")
        if threading.active_count() > threads:
            raise SystemExit(f"everstep-launch: --preload {name}: it starts threads, which no fork has; leave it out")
        if cuda is not None and cuda.is_initialized():
            raise SystemExit(f"everstep-launch: --preload {name}: it initializes CUDA, which no fork may; leave it out")


def _import_if_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        package = name.partition(".")[0]
        if missing.name is None or missing.name == package or not name.startswith(missing.name):
            raise
