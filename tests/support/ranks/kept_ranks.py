"""Ranks that are reused by all tests of a module: processes of one process group that call one function after another.

A new rank takes some tenths of a second of CPU until its first step. Functions must leave a process as they found it.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from tests.support.processes.fork_pool import DEADLINE_S, ChildFailed, ForkedChild, ForkPool


class KeptRanks:
    """Groups of ranks by their number. Each group begins with its first call."""

    def __init__(self, forks: ForkPool) -> None:
        self._forks = forks
        self._groups: dict[int, _Group] = {}

    def call(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what ``function(rank, world, *arguments)`` returns on each rank. Raises ChildFailed."""
        if world not in self._groups:
            self._groups[world] = _Group(self._forks, world)
        try:
            return self._groups[world].call(function, *arguments)
        except BaseException:
            self._groups.pop(world).kill()  # some ranks may wait for the one that failed, or for this call
            raise

    def close(self) -> None:
        for group in self._groups.values():
            group.kill()


class _Group:
    def __init__(self, forks: ForkPool, world: int) -> None:
        from torch._C._distributed_c10d import TCPStore  # most workers need no torch

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ranks = [forks.start(_serve, rank, world, self._store.port) for rank in range(world)]
        self._calls = 0

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        self._calls += 1
        call = (function.__module__, function.__qualname__, arguments)
        self._store.set(f"call/{self._calls}", pickle.dumps(call))  # type: ignore[arg-type]  # bytes are taken, too
        outcomes = [self._outcome(rank, f"answer/{self._calls}/{rank}") for rank in range(len(self._ranks))]
        failures = [value for ok, value in outcomes if not ok]
        if failures:
            raise ChildFailed("\n".join(failures))
        return [value for _, value in outcomes]

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.close()

    def _outcome(self, number: int, key: str) -> tuple[bool, Any]:
        rank: ForkedChild = self._ranks[number]
        deadline = time.perf_counter() + DEADLINE_S
        while not self._store.check([key]):
            if rank.ended():
                try:
                    rank.result()
                except ChildFailed as error:
                    return False, f"rank {number}: {error}"
                return False, f"rank {number} ended"
            if time.perf_counter() > deadline:
                return False, f"no answer from rank {number} within {DEADLINE_S} s"
            time.sleep(0.005)
        outcome: tuple[bool, Any] = pickle.loads(self._store.get(key))
        return outcome


def _serve(rank: int, world: int, port: int) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    torch.set_num_threads(1)
    calls, of_group = (TCPStore("127.0.0.1", port, is_master=False) for _ in range(2))
    dist.init_process_group("gloo", store=PrefixStore("group", of_group), rank=rank, world_size=world)
    for number in itertools.count(1):
        calls.wait([f"call/{number}"], timedelta(days=1))
        module, name, arguments = pickle.loads(calls.get(f"call/{number}"))
        try:
            outcome = True, getattr(importlib.import_module(module), name)(rank, world, *arguments)
            gc.collect()  # models in cycles with their hooks
            dist.barrier()
            answer = pickle.dumps(outcome)
        except Exception:  # noqa: BLE001 - reported to the test
            answer = pickle.dumps((False, traceback.format_exc()))
        calls.set(f"answer/{number}/{rank}", answer)  # type: ignore[arg-type]  # bytes are taken, too
