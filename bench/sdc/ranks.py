"""Keep the processes of all ranks for a whole bench: each call runs one method of `Training` on all of them."""

from __future__ import annotations

import tempfile
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from bench.processes import ProcessPool, RankFailed
from bench.sdc.models import Config

ANSWER_S = 900.0
"""Seconds after which a rank counts as hung."""
OTHERS_S = 5.0
"""Seconds that the others have once a rank has failed; they may wait for it in a collective."""


class Ranks:
    """The processes. Use it as a context manager.

    Args:
        world: How many.
        warm_steps: Steps of training before the state that all runs begin with.
    """

    def __init__(self, world: int, warm_steps: int) -> None:
        self.world, self.warm_steps = world, warm_steps
        self._pool = ProcessPool([_serve.__module__, "bench.sdc.training", "torch._dynamo"])
        self._start()

    def call(self, config: Config, method: str, *args: Any, **options: Any) -> list[Any]:
        """Return what ``method`` of `Training` returns on each rank.

        Raises:
            RankFailed: A rank raised or hung. The next call starts all ranks anew.
        """
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send((config, method, args, options))
        answers, failures, limit_s = dict[int, Any](), list[str](), ANSWER_S
        for rank, pipe in enumerate(self._pipes):
            try:
                is_fine, value = pipe.recv() if pipe.poll(limit_s) else (False, f"rank {rank} did not answer")
            except EOFError:
                is_fine, value = False, f"rank {rank} ended"
            if is_fine:
                answers[rank] = value
            else:
                failures.append(value)
                limit_s = OTHERS_S
        if failures:
            self._stop()
            raise RankFailed(min(failures, key=_is_consequence))
        return [answers[rank] for rank in range(self.world)]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="everstep-bench-")
        self._pipes: list[Connection] = []
        for rank in range(self.world):
            ours, theirs = Pipe()
            self._pool.start(_serve, theirs, self._folder.name, rank, self.world, self.warm_steps)
            theirs.close()
            self._pipes.append(ours)

    def _stop(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        self._pool.end()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
        self._pool.__exit__(None, None, None)


def _is_consequence(failure: str) -> bool:
    """Return whether a failure rather follows from another rank's."""
    return "did not answer" in failure or "Connection" in failure


def _serve(pipe: Connection, folder: str, rank: int, world: int, warm_steps: int) -> None:
    from bench.sdc.training import Training

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    trainings: dict[Config, Training] = {}
    with suppress(EOFError, BrokenPipeError):  # the parent is done, or has died
        while True:
            config, method, args, options = pipe.recv()
            try:
                if config not in trainings:
                    trainings.clear()  # one model at a time
                    trainings[config] = Training(config, rank, world, warm_steps)
                answer = (True, getattr(trainings[config], method)(*args, **options))
            except Exception:  # noqa: BLE001 - handed to the parent whole
                answer = (False, traceback.format_exc())
            pipe.send(answer)
    dist.destroy_process_group()
