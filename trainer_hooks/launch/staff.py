"""The processes of one launcher: made, spoken to, signalled and ended. What is to be done is decided elsewhere."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from signal import Signals

import msgspec

from everstep.errors import ConfigurationError, Unavailable
from trainer_hooks.launch.channel import Channel, pair
from trainer_hooks.launch.environment import plain_environment, server_environment, worker_environment
from trainer_hooks.launch.forks import ForkServerLink, Lost
from trainer_hooks.launch.messages import Arrived, FromForkServer, Promote
from trainer_hooks.launch.options import LaunchOptions
from trainer_hooks.launch.output import Outputs
from trainer_hooks.launch.process import handles

log = logging.getLogger(__name__)

STORE_SERIAL = 0
COUNT_SERIAL = -1


class Heard(msgspec.Struct, frozen=True):
    """A worker's script came to ``trainer_hooks.main``."""

    serial: int


StaffEvent = FromForkServer | Lost | Heard


class Staff:
    """Store host, workers and standbys, through one fork server.

    Args:
        listener: the rendezvous store's listening socket. It stays open here, so that the address outlives its host.
        happened: gets births, deaths and arrivals.
        label: the present name of a worker, for its lines of output.
    """

    def __init__(
        self,
        options: LaunchOptions,
        environ: Mapping[str, str],
        listener: socket.socket,
        happened: Callable[[StaffEvent], None],
        label: Callable[[int], str],
    ) -> None:
        self._options = options
        self._listener = listener
        self._happened = happened
        self._forks = ForkServerLink(happened, server_environment(options, environ))
        self._controls: dict[int, Channel[Arrived]] = {}
        directory = Path(options.log_dir) / options.job if options.log_dir is not None else None
        self._outputs = Outputs(directory, options.tee, label) if directory is not None else None

    @property
    def address(self) -> tuple[str, int]:
        """Where the rendezvous store is."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    def start(self) -> None:
        """Starts the fork server and in it the store host; orders wait until torch is imported."""
        self._forks.start()
        self.host_store()

    def host_store(self) -> None:
        """Forks the process that serves the store."""
        host, port = self.address
        target = "trainer_hooks.launch.store_host:host"
        arguments = {"address": host, "port": port}
        self._forks.fork(STORE_SERIAL, target, arguments, descriptors=(self._listener.fileno(),))

    async def count_ranks(self) -> int:
        """Ranks of this node. Raises ConfigurationError where there is no GPU, Unavailable without a fork server."""
        kind = self._options.nproc_per_node
        if isinstance(kind, int):
            return kind
        reading, writing = os.pipe2(os.O_CLOEXEC)
        target = "trainer_hooks.launch.devices:report_count"
        self._forks.fork(COUNT_SERIAL, target, {"kind": kind}, descriptors=(writing,))
        os.close(writing)
        text = await _read_all(reading)
        if not text:
            raise Unavailable("the fork server ended before it could count devices; what it said is above")
        if int(text) == 0:
            raise ConfigurationError("--nproc-per-node gpu: no CUDA device is visible here; give a number, cpu or auto")
        return int(text)

    def start_worker(self, serial: int, local_rank: int | None, *, nproc: int, agent_socket: str) -> None:
        """Forks a worker, or a standby where ``local_rank`` is None."""
        options = self._options
        environment = worker_environment(options, agent_socket=agent_socket, nproc=nproc, local_rank=local_rank)
        if options.max_nodes == 1 and local_rank is not None:
            host, port = self.address
            environment |= plain_environment(local_rank=local_rank, nproc=nproc, host=host, port=port)
        arguments = {"script": options.script, "module": options.module, "arguments": list(options.arguments)}
        outputs = self._outputs.open(serial) if self._outputs is not None else ()
        ours, theirs = pair()
        with theirs:
            self._forks.fork(
                serial,
                "trainer_hooks.launch.worker:run",
                arguments,
                environment=environment,
                descriptors=(theirs.fileno(), *outputs),
            )
        for descriptor in outputs:
            os.close(descriptor)
        self._controls[serial] = Channel(ours, Arrived)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._listen, serial)

    def promote(self, serial: int, local_rank: int) -> None:
        """Tells a standby what it is now. Where it has just died, its exit follows."""
        try:
            self._controls[serial].send(Promote(local_rank=local_rank))
        except (KeyError, OSError):
            log.debug("worker %d is gone before its promotion", serial)

    def signal(self, serials: Iterable[int], number: signal.Signals) -> None:
        """Sends a signal to each; those that are dead already do not mind."""
        for serial in serials:
            self._forks.signal(serial, number)

    def pass_on(self, number: Signals, living: Iterable[tuple[int, int]]) -> None:
        """Sends a signal to those of ``living`` (serials and pids) that have a handler for it: others it would end."""
        able = [serial for serial, pid in living if handles(pid, number)]
        self.signal(able, number)
        if able:
            log.info("%s is passed on to %d processes that handle it", number.name, len(able))
        else:
            log.warning("%s changes nothing: no rank has a handler for it", number.name)

    def hang_up(self, serial: int) -> None:
        """Closes the line to a worker."""
        control = self._controls.pop(serial, None)
        if control is not None:
            asyncio.get_running_loop().remove_reader(control.fileno())
            control.close()

    async def end(self) -> None:
        """Ends the fork server, and with it everyone who is left."""
        try:
            await self._forks.end()
        finally:
            for serial in list(self._controls):
                self.hang_up(serial)
            if self._outputs is not None:
                self._outputs.drain()

    def _listen(self, serial: int) -> None:
        try:
            received = self._controls[serial].receive(wait=False)
        except BlockingIOError:
            return
        if received is None:
            self.hang_up(serial)
        else:
            self._happened(Heard(serial))


async def _read_all(descriptor: int) -> bytes:
    reader = asyncio.StreamReader()
    pipe = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        return await reader.read()
    finally:
        transport.close()
