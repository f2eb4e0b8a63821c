"""Run a training function under ``everstep-launch``, torchrun or plain Python."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from everstep.chaos.targets import JOB_VARIABLE
from everstep.clock import Clock
from everstep.errors import ConfigurationError
from everstep.system_clock import SYSTEM_CLOCK
from everstep_trainer.config import HookSettings
from everstep_trainer.launch.assignment import (
    TORCHRUN_SCRIPT_VARIABLE,
    WorkerAssignment,
    current_assignment,
    leave_environment,
    parent_rank,
    wait_for_local_rank,
)
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.runtime.abort import make_backend
from everstep_trainer.runtime.process_group import device_for
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.worker.rank_worker import TrainingFunction, Worker
from everstep_trainer.worker.warm_up import warm_up_tracking

log = logging.getLogger(__name__)


def main(train: TrainingFunction, *, settings: HookSettings | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
    """Run ``train(run)`` and keep it stepping through failures if ``everstep-launch`` started the script.

    * Under ``everstep-launch`` ``train`` is called once in each generation; ``main`` returns when the job ended well.
    * If a process group exists already (Ray's, or the script's own), it is used and left as it was.
    * In a program that a rank starts, such as an evaluation, there is one rank and no process group.
    * Under plain torchrun (RANK and WORLD_SIZE are set) the process group comes from the environment.
    * Otherwise there is one rank and no process group.

    In the last four cases nothing is tracked, and exceptions of ``train`` pass through.

    Example::

        def train(run: everstep.Run) -> None:
            ...

        if __name__ == "__main__":
            everstep.main(train)

    Args:
        train: The training function; an ordinary function of one argument.
        settings: Settings of this rank; default `HookSettings()`.
        clock: Source of time, for tests.

    Raises:
        SystemExit: With status 1, the job was stopped because of an error.
        ConfigurationError: Settings contradict each other, ``train`` is a coroutine or generator, or a child process of
            multiprocessing called ``main`` while importing the script.
    """
    _check(train)
    settings = (settings or HookSettings()).validate()
    assignment = current_assignment()
    if assignment is not None:
        if dist.is_available() and dist.is_initialized():
            log.warning(
                "this script called init_process_group: under everstep-launch that group is replaced by the group of "
                "each generation, and a replacement for a lost rank cannot join it; skip the call if EVERSTEP_JOB is "
                "set"
            )
            dist.destroy_process_group()
        _run_worker(train, assignment, settings, clock)
    elif dist.is_available() and dist.is_initialized():
        nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config())
        _run_in_group(train, torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu"))
    elif (rank := parent_rank()) is not None:
        _run_below_rank(train, rank)
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _run_under_torchrun(train, settings)
    else:
        _run_alone(train, 0)


def _run_worker(train: TrainingFunction, assignment: WorkerAssignment, settings: HookSettings, clock: Clock) -> None:
    if assignment.local_rank is not None:
        local_rank = wait_for_local_rank()  # first: tells the launcher that the script has come this far
        worker = Worker(assignment, settings, clock)
    else:  # a standby does all it can before it is needed
        worker = Worker(assignment, settings, clock)
        warm_up_tracking()
        local_rank = wait_for_local_rank()
    worker.run(train, local_rank)


def _check(train: TrainingFunction) -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # the check that multiprocessing makes itself
        raise ConfigurationError(
            "a process spawned by multiprocessing (such as a data loader's worker) imports the script and would train "
            "too: call everstep.main under `if __name__ == '__main__':`"
        )
    if os.environ.get(TORCHRUN_SCRIPT_VARIABLE):
        raise ConfigurationError(
            "this script calls everstep.main: omit --torchrun-script and --no-python of everstep-launch, which are for "
            "scripts that do not"
        )
    if inspect.iscoroutinefunction(train) or inspect.isgeneratorfunction(train):
        raise ConfigurationError("the training function is a coroutine or a generator: make it an ordinary function")


def _run_alone(train: TrainingFunction, cuda_device: int) -> None:
    device = torch.device("cuda", cuda_device) if torch.cuda.is_available() else torch.device("cpu")
    train(Run(RankContext(device=device), TrainingSession()))


def _run_below_rank(train: TrainingFunction, rank: str) -> None:
    """Run the training function of a program that a rank started, on the rank's device."""
    log.warning(
        "rank %s of job %s started this program: it runs alone, as under plain python, and nothing is tracked",
        rank,
        os.environ.get(JOB_VARIABLE),
    )
    cuda_device = int(os.environ.get("LOCAL_RANK", "0"))
    leave_environment()
    _run_alone(train, cuda_device)


def _run_under_torchrun(train: TrainingFunction, settings: HookSettings) -> None:
    backend = make_backend(settings.backend)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = device_for(backend, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend.name)
    try:
        _run_in_group(train, device)
    finally:
        dist.destroy_process_group()


def _run_in_group(train: TrainingFunction, device: torch.device) -> None:
    """Run the training function once, on the ranks of the existing process group."""
    place = RankContext(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        device=device,
        mesh=lambda: init_device_mesh(device.type, (dist.get_world_size(),)),
    )
    train(Run(place, TrainingSession()))
