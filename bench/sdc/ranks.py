"""Keep the processes of all ranks for a whole bench: each call runs one method of `Training` on all of them."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from bench.sdc.models import Config


class RankFailed(RuntimeError):
    """A rank raised; the message is its traceback."""


class Ranks:
    """The processes. Use it as a context manager.

    Args:
        world: How many.
        warm_steps: Steps of training before the state that all runs begin with.
        window: Steps in which a fault may be found.
    """

    def __init__(self, world: int, warm_steps: int, window: int) -> None:
        self.world, self.warm_steps, self.window = world, warm_steps, window
        self._folder = tempfile.TemporaryDirectory(prefix="everstep-bench-")
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (theirs, self._folder.name, rank, world, warm_steps, window)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, config: Config, method: str, *args: Any, **options: Any) -> list[Any]:
        """Return what ``method`` of `Training` returns on each rank. Raises RankFailed."""
        for pipe in self._pipes:
            pipe.send((config, method, args, options))
        answers = [pipe.recv() for pipe in self._pipes]
        for is_fine, value in answers:
            if not is_fine:
                raise RankFailed(value)
        return [value for _, value in answers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # a waiting rank leaves its loop
        for process in self._processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def _serve(pipe: Connection, folder: str, rank: int, world: int, warm_steps: int, window: int) -> None:
    from bench.sdc.training import Training

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    trainings: dict[Config, Training] = {}
    while True:
        try:
            config, method, args, options = pipe.recv()
        except EOFError:
            break
        try:
            if config not in trainings:
                trainings.clear()  # one model at a time
                trainings[config] = Training(config, rank, world, warm_steps, window)
            pipe.send((True, getattr(trainings[config], method)(*args, **options)))
        except Exception:  # noqa: BLE001 - handed to the parent whole
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()
