"""Rows of what others do with the same state of one rank: torch.save, torch.distributed.checkpoint, NVIDIA's local
checkpoints. Saving is how long the training thread is blocked, done is when the checkpoint is there."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from bench.checkpoint_rows.state import Size
from bench.peers.run import PYTHON, install
from bench.processes import ProcessPool, RankFailed
from bench.table import Row

NVRX = "nvidia-resiliency-ext==0.4.1"
NVRX_DEPENDENCIES = ("defusedxml", "nvidia-ml-py", "packaging", "psutil", "pyyaml")
NVRX_SCRIPT = Path(__file__).with_name("nvrx_local.py")
PATIENCE_S = 300.0
PLACES = {"disk": None, "/dev/shm": "/dev/shm"}

Took = dict[str, list[float]]
"""Seconds: save, done (where that is later), load."""


def _state(size: Size) -> dict[str, torch.Tensor]:
    return {f"part{i}": torch.full((size.tensor_bytes // 4,), float(i)) for i in range(size.tensors)}


@contextmanager
def _folder(place: str) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="everstep-peer-", dir=PLACES[place]))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def torch_save(size: Size, repeats: int, folder: str) -> Took:
    """torch.save of a dictionary into one file, torch.load with a copy into the live tensors."""
    torch.set_num_threads(1)
    state, path, took = _state(size), Path(folder) / "state.pt", Took(save=[], load=[])
    for _ in range(repeats):
        took["save"].append(_seconds(lambda: torch.save(state, path)))
        took["load"].append(_seconds(lambda: _take(state, torch.load(path))))
    return took


def _take(state: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        tensor.copy_(loaded[name])


def dcp_save(size: Size, repeats: int, folder: str) -> Took:
    """dcp.save and dcp.load in place."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that there is one process only
    state, took = _state(size), Took(save=[], load=[])
    for number in range(repeats):
        path = f"{folder}/{number}"
        took["save"].append(_seconds(partial(save, state, checkpoint_id=path, no_dist=True)))
        took["load"].append(_seconds(partial(load, state, checkpoint_id=path, no_dist=True)))
        shutil.rmtree(path)
    return took


def dcp_async(size: Size, repeats: int, folder: str, how: str) -> Took:
    """dcp.async_save by a thread, by a process, or by a thread with a stager that keeps its shared memory."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
    stager = DefaultStager(StagingOptions(False, True, False, False)) if how == "thread, shared memory" else None
    state, took = _state(size), Took(save=[], done=[])
    for number in range(repeats + 1):  # the first one starts what the others use
        path = f"{folder}/{number}"
        began = time.perf_counter()
        answer: Any = async_save(state, checkpoint_id=path, async_checkpointer_type=kind, async_stager=stager)
        blocked = time.perf_counter() - began
        getattr(answer, "upload_completion", answer).result()
        if number:
            took["save"].append(blocked)
            took["done"].append(time.perf_counter() - began)
        shutil.rmtree(path)
    return took


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def install_nvrx() -> None:
    """NVIDIA's package into the peers' environment, once. Raises CalledProcessError where it cannot be had."""
    install()
    if subprocess.run([str(PYTHON), "-c", "import nvidia_resiliency_ext"], capture_output=True).returncode == 0:
        return
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *NVRX_DEPENDENCIES], check=True, capture_output=True)
    subprocess.run([*pip, "--no-deps", NVRX], check=True, capture_output=True)


def _nvrx(size: Size, repeats: int, folder: Path) -> Took:
    command = [str(PYTHON), str(NVRX_SCRIPT), str(folder), str(size.tensors), str(size.tensor_bytes), str(repeats)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    took: Took = json.loads(said.stdout.splitlines()[-1])
    return took


def _in_folder(
    pool: ProcessPool, function: Callable[..., Took], size: Size, repeats: int, options: tuple[str, ...], folder: Path
) -> Took:
    took: Took = pool.one(function, size, repeats, str(folder), *options)
    return took


def rows(pool: ProcessPool, size: Size, repeats: int, slow: bool) -> list[Row]:
    """Every peer that runs here; one that does not is a row that says why. ``slow``: also those that take long."""
    found: list[Row] = []
    for place in PLACES:
        for name, function in (("torch.save", torch_save), ("DCP save", dcp_save)):
            found += _one(f"{name} to {place}", place, partial(_in_folder, pool, function, size, repeats, ()))
    for how in ("thread", "thread, shared memory", "process") if slow else ():
        found += _one(
            f"DCP async_save by {how}, to /dev/shm",
            "/dev/shm",
            partial(_in_folder, pool, dcp_async, size, repeats, (how,)),
        )
    return found + _nvrx_rows(size, repeats)


def _nvrx_rows(size: Size, repeats: int) -> list[Row]:
    name = "nvidia-resiliency-ext 0.4.1 local checkpoint to /dev/shm"
    try:
        install_nvrx()
    except (subprocess.CalledProcessError, OSError) as error:
        return [Row(name, None, "ms", against=f"cannot be installed: {_last_line(error)}")]
    return _one(name, "/dev/shm", lambda folder: _nvrx(size, repeats, folder), "host tensors: not its asynchronous way")


def _one(name: str, place: str, measure: Callable[[Path], Took], remark: str = "") -> list[Row]:
    with _folder(place) as folder:
        try:
            took = measure(folder)
        except (RankFailed, subprocess.SubprocessError) as error:
            return [Row(name, None, "ms", against=f"does not run: {_last_line(error)}")]
    words = {"save": "blocked", "done": "done", "load": "loaded"}
    return [
        Row(f"{name}: {words[what]}", median(seconds) * 1e3, "ms", against=remark or "peer")
        for what, seconds in took.items()
    ]


def _last_line(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    text = said.decode(errors="replace") if isinstance(said, bytes) else str(said or error)
    return text.strip().splitlines()[-1][:120]
