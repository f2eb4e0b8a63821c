"""Run a Ray Train loop in a rank process, which ``everstep-launch`` starts below a Ray worker (``integrations.ray``).

The process is no Ray actor. Ray Train's functions find a ``RankTrainFnUtils`` here, which answers from the generation's
environment, and hands reports of rank 0 to the Ray worker through a socket that only this user can open.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import ray.cloudpickle
import torch.distributed as dist
from ray.train.v2._internal.execution.train_fn_utils import TrainFnUtils, set_train_fn_utils
from ray.train.v2.api.context import LocalTrainContext

import everstep
from everstep_trainer.run import newest_run


class RankTrainFnUtils(TrainFnUtils):
    """Ray Train's functions in a rank process. What takes a Ray actor raises RuntimeError, with a way to do without.

    Args:
        experiment: Name of the Ray Train run.
        checkpoint: The checkpoint that Ray Train had when the Ray worker started, or None.
        reports: Socket of the Ray worker.
    """

    def __init__(self, experiment: str, checkpoint: Any, reports: Path) -> None:
        self._experiment, self._checkpoint, self._reports = experiment, checkpoint, reports

    def report(
        self, metrics: dict[str, Any], checkpoint: Any = None, checkpoint_dir_name: str | None = None, **options: Any
    ) -> None:
        """Report metrics, and optionally a local checkpoint folder, if this is rank 0; else do nothing.

        Returns once the Ray worker has taken the report, and copied the checkpoint to Ray's storage. The rank is not
        taken for hung meanwhile.
        """
        if refused := [name for name in ("checkpoint_upload_fn", "validation") if options.get(name)]:
            raise RuntimeError(f"ray.train.report takes no {' or '.join(refused)} in a rank of everstep-launch")
        if _number("RANK", 0) != 0:
            return
        path = None
        if checkpoint is not None:
            path = os.path.abspath(checkpoint.path)
            if not os.path.isdir(path):
                raise ValueError(f"report a checkpoint of a local folder: {checkpoint.path} is none")
        message = {"metrics": metrics, "checkpoint": path, "checkpoint_dir_name": checkpoint_dir_name}
        encoded = msgspec.msgpack.encode(message, enc_hook=_plain)
        run = newest_run()
        with (
            nullcontext() if run is None else run.alone("report"),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection,
        ):
            connection.connect(str(self._reports))
            connection.sendall(encoded)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.makefile("rb").read()
        problem = msgspec.msgpack.decode(answer) if answer else "the Ray worker is ending"
        if problem:
            raise RuntimeError(f"ray.train.report failed: {problem}")

    def get_context(self) -> LocalTrainContext:
        """Return the place of this rank in its generation, so ask again in each generation."""
        return LocalTrainContext(
            experiment_name=self._experiment,
            world_size=_number("WORLD_SIZE", 1),
            world_rank=_number("RANK", 0),
            local_rank=_number("LOCAL_RANK", 0),
            local_world_size=_number("LOCAL_WORLD_SIZE", 1),
            node_rank=_number("NODE_RANK", 0),
        )

    def get_checkpoint(self) -> Any:
        return self._checkpoint

    def get_preemption_info(self) -> None:
        return None

    def is_distributed(self) -> bool:
        return dist.is_initialized()

    def barrier(self) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast_from_rank_zero(self, data: Any) -> NoReturn:
        _refuse("broadcast_from_rank_zero", "broadcast tensors with torch.distributed")

    def get_dataset_shard(self, dataset_info: Any) -> NoReturn:
        _refuse("get_dataset_shard", "load data with run.loader, which continues after a lost rank")

    def get_all_reported_checkpoints(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("get_all_reported_checkpoints", "read Result.best_checkpoints after fit")


def _number(variable: str, default: int) -> int:
    return int(os.environ.get(variable, default))


def _plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as a number. Raises NotImplementedError for other objects."""
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise NotImplementedError(f"metrics are numbers, strings, lists and dicts, not {type(value).__name__}")


def _refuse(function: str, advice: str) -> NoReturn:
    raise RuntimeError(f"{function} works only in a Ray actor, and ranks of everstep-launch are none: {advice}")


def is_training_function(loop: Any) -> bool:
    """Return whether a loop is a training function of Everstep's, whose parameter is called ``run``."""
    return next(iter(inspect.signature(loop).parameters), "") == "run"


def main(folder: Path) -> None:
    """Run the loop that the Ray worker wrote to ``folder``, which only this user can write."""
    work = ray.cloudpickle.loads((folder / "work").read_bytes())
    sys.path += [entry for entry in work["path"] if entry not in sys.path]
    loop = ray.cloudpickle.loads(work["loop"])
    set_train_fn_utils(RankTrainFnUtils(work["experiment"], work["checkpoint"], folder / "reports"))
    function = inspect.unwrap(loop)  # Ray calls it with a config
    if is_training_function(function):
        everstep.main(function)
    else:
        loop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
