"""Environment variables of the fork server and of workers; what a generation decides, the worker sets itself."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from trainer_hooks.assignment import AGENT_SOCKET, JOB, LOCAL_RANK, START_FROM
from trainer_hooks.launch.cache import cache_environment
from trainer_hooks.launch.options import LaunchOptions
from trainer_hooks.launch.preload import PRELOAD
from trainer_hooks.launch.run_directory import state_dir

log = logging.getLogger(__name__)


def server_environment(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """The fork server's, and so every worker's. One thread for each rank unless told otherwise, as torchrun does.

    It has to be set before torch is imported, which is before GPUs are counted: ``gpu`` and ``auto`` are several.
    Makes the job's folder for compiled code, and names it.
    """
    name = options.cache_name or options.job
    environment = {**environ, **cache_environment(state_dir(options.state_dir, environ), name, environ)}
    environment[PRELOAD] = ",".join(options.preload)
    if options.nproc_per_node != 1 and "OMP_NUM_THREADS" not in environ:
        environment["OMP_NUM_THREADS"] = "1"
        log.info("OMP_NUM_THREADS is not set: each rank gets 1 thread, so that ranks do not fight over cores")
    return environment


def worker_environment(
    options: LaunchOptions, *, agent_socket: str, nproc: int, local_rank: int | None
) -> dict[str, str | None]:
    """What a worker has from its birth; a standby's LOCAL_RANK is unset, whatever the launcher's own is."""
    return {
        JOB: options.job,
        AGENT_SOCKET: agent_socket,
        LOCAL_RANK: None if local_rank is None else str(local_rank),
        START_FROM: options.start_from,
        "LOCAL_WORLD_SIZE": str(nproc),
        "TORCHELASTIC_RUN_ID": options.job,
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def plain_environment(*, local_rank: int, nproc: int, host: str, port: int) -> dict[str, str]:
    """On a single node ranks are known beforehand: what a script needs that never calls ``trainer_hooks.main``."""
    rank = str(local_rank)
    return {
        "RANK": rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": str(nproc),
        "ROLE_WORLD_SIZE": str(nproc),
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
