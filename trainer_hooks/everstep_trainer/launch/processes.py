"""Start, signal and end the processes of one launcher; other modules decide when."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from signal import Signals
from typing import Any

import msgspec

from everstep.chaos.targets import AGENT_SOCKET_VARIABLE, JOB_VARIABLE
from everstep.errors import ConfigurationError, Unavailable
from everstep.host.processes import has_signal_handler
from everstep_trainer.launch.assignment import (
    ALLOW_BIT_FLIPS_VARIABLE,
    LOCAL_RANK_VARIABLE,
    START_FROM_VARIABLE,
)
from everstep_trainer.launch.forking.fork_client import ForkServerClient, ForkServerLost
from everstep_trainer.launch.forking.fork_messages import (
    ControlChannel,
    FromForkServer,
    Promote,
    ReachedMain,
    make_socket_pair,
)
from everstep_trainer.launch.forking.forkserver import PRELOAD_VARIABLE
from everstep_trainer.launch.job_cache import cache_environment
from everstep_trainer.launch.options import LaunchOptions
from everstep_trainer.launch.output.worker_output import WorkerOutput
from everstep_trainer.launch.services.private_services import resolve_state_dir

# ---- environment variables of the fork server and of workers; those of a generation are set by the worker itself

log = logging.getLogger(__name__)

NCCL2_VARIABLE = "TORCH_DIST_USE_NCCL2"
"""Read when torch is imported: which implementation the name "nccl" stands for. From torch 2.15 on the newer one,
nccl2, is the default. Its abort ended the process in torch 2.14, and Everstep was not tested with it."""


def fork_server_environment(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the fork server and thus of every worker; makes the job's folder for compiled code.

    Each rank gets one thread by default, as with torchrun. This must be set before torch is imported, which is before
    GPUs are counted, so ``gpu`` and ``auto`` count as several ranks.
    """
    state_dir = resolve_state_dir(options.directories.state_dir, environ)
    environment = {**environ, **cache_environment(state_dir, options.cache_name or options.job, environ)}
    environment.setdefault(NCCL2_VARIABLE, "0")
    environment[PRELOAD_VARIABLE] = ",".join(options.processes.preload)
    environment[JOB_VARIABLE] = options.job  # by these two `everstep chaos` finds the processes of a job
    if options.agent_socket is not None:
        environment[AGENT_SOCKET_VARIABLE] = options.agent_socket
    if options.nproc_per_node != 1 and "OMP_NUM_THREADS" not in environ:
        environment["OMP_NUM_THREADS"] = "1"
        log.debug("OMP_NUM_THREADS is not set: each rank gets 1 thread, so that ranks do not compete for cores")
    return environment


def worker_environment(
    options: LaunchOptions,
    *,
    agent_socket: str,
    nproc: int,
    local_rank: int | None,
    store: tuple[str, int],
    script_restarts: int = 0,
) -> dict[str, str | None]:
    """Return a new worker's variables; a standby's LOCAL_RANK is unset, whatever the launcher's own is.

    A single node's local ranks are also their static ranks, for a script that never calls ``everstep.main``.
    """
    world, rank = str(nproc), str(local_rank)
    environment = {
        JOB_VARIABLE: options.job,
        AGENT_SOCKET_VARIABLE: agent_socket,
        LOCAL_RANK_VARIABLE: None if local_rank is None else rank,
        START_FROM_VARIABLE: options.start_from,
        ALLOW_BIT_FLIPS_VARIABLE: "1" if options.allows_bit_flips else None,
        "LOCAL_WORLD_SIZE": world,
        "TORCHELASTIC_RUN_ID": options.job,
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if options.max_nodes > 1 or local_rank is None:
        return environment
    return environment | {
        "RANK": rank,
        "ROLE_RANK": rank,
        "WORLD_SIZE": world,
        "ROLE_WORLD_SIZE": world,
        "ROLE_NAME": "default",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": store[0],
        "MASTER_PORT": str(store[1]),
        "TORCHELASTIC_RESTART_COUNT": str(script_restarts),
    }


STORE_SERIAL = 0
TORCHRUN_SCRIPT_MODULE = "everstep_trainer.launch.torchrun_script"
COUNT_SERIAL = -1


class ScriptCommand(msgspec.Struct, frozen=True, kw_only=True):
    """What each rank starts with ``--torchrun-script``. ``address``: this node's, for the other nodes."""

    script: str
    module: bool
    no_python: bool = False
    arguments: tuple[str, ...]
    address: str
    grace_s: float
    max_restarts: int

    def to_json(self) -> str:
        """Return this as an argument of the ranks' program; file names that are not UTF-8 stay as they are."""
        return json.dumps(msgspec.to_builtins(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> ScriptCommand:
        """Return the command of ``to_json``."""
        return msgspec.convert(json.loads(text), cls)


class WorkerReachedMain(msgspec.Struct, frozen=True):
    """A worker's script reached ``everstep.main``."""

    serial: int


ProcessEvent = FromForkServer | ForkServerLost | WorkerReachedMain


class WorkerProcesses:
    """Store host, workers and standbys, through one fork server.

    The rendezvous store's ``listener`` stays open here, so that the address outlives its host. ``on_event`` receives
    starts, deaths and arrivals at ``everstep.main``; ``output`` takes what workers print.
    """

    def __init__(
        self,
        options: LaunchOptions,
        environ: Mapping[str, str],
        listener: socket.socket,
        on_event: Callable[[ProcessEvent], None],
        output: WorkerOutput,
    ) -> None:
        self._options = options
        self._output = output
        self._listener = listener
        self._on_event = on_event
        self._forks = ForkServerClient(on_event, fork_server_environment(options, environ))
        self._controls: dict[int, ControlChannel[ReachedMain]] = {}

    @property
    def address(self) -> tuple[str, int]:
        """Address of the rendezvous store."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def start(self) -> None:
        """Start the fork server and in it the store host; orders wait until torch is imported."""
        self._forks.start()
        self.start_store_host()

    def was_fork_server_killed(self) -> bool:
        """Return whether a signal ended the lost fork server, rather than an error of its own."""
        return self._forks.was_killed()

    def start_store_host(self) -> None:
        """Fork the process that serves the store."""
        host, port = self.address
        target = "everstep_trainer.launch.children:serve_store"
        arguments = {"address": host, "port": port}
        self._forks.fork(STORE_SERIAL, target, arguments, descriptors=(self._listener.fileno(),))

    async def count_ranks(self) -> int:
        """Return the number of ranks on this node. Raises ConfigurationError for a lack of GPUs, or Unavailable."""
        kind = self._options.nproc_per_node
        if isinstance(kind, int):
            return kind
        reading, writing = os.pipe2(os.O_CLOEXEC)
        target = "everstep_trainer.launch.children:write_rank_count"
        self._forks.fork(COUNT_SERIAL, target, {"kind": kind}, descriptors=(writing,))
        os.close(writing)
        text = await asyncio.to_thread(_read_all, reading)
        if not text:
            raise Unavailable("the fork server ended before it could count devices; see its output above")
        if int(text) == 0:
            raise ConfigurationError("--nproc-per-node gpu: no CUDA device is visible here; give a number, cpu or auto")
        return int(text)

    def start_worker(
        self, serial: int, local_rank: int | None, *, nproc: int, agent_socket: str, script_restarts: int
    ) -> None:
        """Fork a worker, or a standby if ``local_rank`` is None."""
        options = self._options
        environment = worker_environment(
            options,
            agent_socket=agent_socket,
            nproc=nproc,
            local_rank=local_rank,
            store=self.address,
            script_restarts=script_restarts,
        )
        arguments = self._make_arguments()
        outputs, variables = self._output.open(serial, local_rank)
        ours, theirs = make_socket_pair()
        with theirs:
            target, descriptors = "everstep_trainer.launch.children:run_script", (theirs.fileno(), *outputs)
            self._forks.fork(serial, target, arguments, environment=environment | variables, descriptors=descriptors)
        for descriptor in outputs:
            os.close(descriptor)
        self._controls[serial] = ControlChannel(ours, ReachedMain)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._listen, serial)

    def _make_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``children.run_script``."""
        options = self._options
        if not options.torchrun_script:
            script, module, arguments = options.script, options.module, list(options.arguments)
        else:
            command = ScriptCommand(
                script=options.script,
                module=options.module,
                no_python=options.no_python,
                arguments=options.arguments,
                address=self.address[0],
                grace_s=options.waits.grace_s,
                max_restarts=options.max_script_restarts or 0,
            )
            script, module, arguments = TORCHRUN_SCRIPT_MODULE, True, [command.to_json()]
        return {
            "script": os.fsencode(script),
            "module": module,
            "no_python": options.no_python and not options.torchrun_script,
            "arguments": [os.fsencode(argument) for argument in arguments],
            "name": os.fsencode(options.script),
        }

    def promote(self, serial: int, local_rank: int) -> None:
        """Give a standby its local rank. If it has just died, its exit event follows."""
        try:
            self._controls[serial].send(Promote(local_rank=local_rank))
            self._output.assign(serial, local_rank)
        except (KeyError, OSError):
            log.debug("worker %d died before its promotion", serial)

    def signal(self, serials: Iterable[int], number: Signals) -> None:
        """Send a signal to each worker; dead ones are ignored."""
        for serial in serials:
            self._forks.signal(serial, number)

    def forward_signal(self, number: Signals, living: Mapping[int, int]) -> None:
        """Send a signal to those of ``living`` (pids by serial) that have a handler; it would end the others."""
        able = [serial for serial, pid in living.items() if has_signal_handler(pid, number)]
        self.signal(able, number)
        if able:
            log.info("%s is forwarded to %d processes that handle it", number.name, len(able))
        else:
            log.warning("%s is ignored: no rank has a handler for it", number.name)

    def close_control(self, serial: int) -> None:
        """Close the control channel of a worker."""
        control = self._controls.pop(serial, None)
        if control is not None:
            asyncio.get_running_loop().remove_reader(control.fileno())
            control.close()

    async def end(self) -> None:
        """End the fork server, and with it all remaining processes."""
        try:
            await self._forks.end()
        finally:
            for serial in list(self._controls):
                self.close_control(serial)

    def _listen(self, serial: int) -> None:
        try:
            received = self._controls[serial].receive(wait=False)
        except BlockingIOError:
            return
        if received is None:
            self.close_control(serial)
        else:
            self._on_event(WorkerReachedMain(serial))


def _read_all(descriptor: int) -> bytes:
    with open(descriptor, "rb") as pipe:
        return pipe.read()
