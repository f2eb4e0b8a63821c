"""What the fork server imports, so that no worker has to.

Everything here is imported lazily by ordinary training code at its first step, or its first failure; in a fresh
process that is where a replacement loses its seconds. Importing them together takes about 1.5 s and 310 MB once;
a child forked afterwards shares the pages and starts in 5 to 10 ms.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterable

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


def _import_if_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as missing:
        package = name.partition(".")[0]
        if missing.name is None or missing.name == package or not name.startswith(missing.name):
            raise
