"""Ranks of one node in forked processes, under a fake agent and with a real rendezvous store."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from everstep.wire.v1.directives import NewGeneration, StopJob
from everstep.wire.v1.training import GenerationSpec
from tests.support.agents.fake_agent import FakeAgent, Peer, fake_agent
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkedChild, ForkPool
from tests.support.processes.waiting import until

NODE = "n1"


def host_store(port_file: str, port: int = 0) -> None:
    """Serve a rendezvous store in its own process until it is killed."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    Path(port_file + ".new").write_text(str(store.port))
    os.rename(port_file + ".new", port_file)
    signal.pause()


def run_rank(socket_path: str, local_rank: int, train: Callable[..., None], settings: dict[str, Any]) -> None:
    """Run one rank in its own process, as everstep-launch would start it."""
    from everstep.system_clock import SYSTEM_CLOCK
    from everstep_trainer.config import HookSettings
    from everstep_trainer.launch.assignment import WorkerAssignment
    from everstep_trainer.worker.rank_worker import Worker

    assignment = WorkerAssignment(job=JOB, agent_socket=socket_path, local_rank=local_rank)
    Worker(assignment, HookSettings(backend="gloo", **settings), SYSTEM_CLOCK).run(train)


class NodeRanks:
    """Ranks of one node, by local rank. ``settings`` are those of HookSettings."""

    def __init__(self, forks: ForkPool, agent: FakeAgent, train: Callable[..., None], settings: dict[str, Any]) -> None:
        self.agent = agent
        self.ranks: dict[int, ForkedChild] = {}
        self._forks = forks
        self._train = train
        self._settings = settings
        self._stores: dict[str, ForkedChild] = {}
        self.store = self.new_store()

    def new_store(self, port: int = 0) -> str:
        """Start another rendezvous store in its own process, and return its address. ``port``: a free port."""
        port_file = self.agent.path.parent / f"store{len(self._stores)}"
        port_file.unlink(missing_ok=True)
        process = self._forks.start(host_store, str(port_file), port)
        served = until(lambda: port_file.read_text() if port_file.exists() else "", "the store serves")
        address = f"127.0.0.1:{served}"
        self._stores[address] = process
        return address

    def kill_store(self, address: str) -> None:
        self._stores[address].kill()

    def start(self, *local_ranks: int) -> None:
        """Start ranks, and wait for their Hello."""
        for local_rank in local_ranks:
            self.ranks[local_rank] = self._forks.start(
                run_rank, str(self.agent.path), local_rank, self._train, self._settings
            )
        for local_rank in local_ranks:
            self.peer(local_rank)

    def peer(self, local_rank: int) -> Peer:
        """Return the connection of a local rank's process."""
        pid = self.ranks[local_rank].pid
        return self.agent.wait_until(
            lambda: next((p for p in self.agent.peers if p.hello and p.hello.pid == pid), None),
            f"a Hello of local rank {local_rank}",
        )

    def generation(self, number: int, *local_ranks: int, **more: Any) -> GenerationSpec:
        more.setdefault("store", self.store)
        return generation(number, ranks=[(NODE, r) for r in local_ranks], **more)

    def send(self, message: Any) -> None:
        """Send a message to all ranks."""
        for local_rank in self.ranks:
            with contextlib.suppress(OSError):  # it died meanwhile
                self.peer(local_rank).send(message)

    def form_generation(self, number: int, *local_ranks: int, **more: Any) -> GenerationSpec:
        """Send a new generation to every rank."""
        spec = self.generation(number, *local_ranks, **more)
        self.send(NewGeneration(spec=spec))
        return spec

    def kill(self, local_rank: int) -> None:
        self.ranks.pop(local_rank).kill()

    def signal(self, local_rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks[local_rank].pid, number)

    def wait_for_messages(
        self, kind: type[Any], count: int, *, where: Callable[[Any], bool] = lambda _: True
    ) -> list[Any]:
        """Wait for at least ``count`` messages of this kind, and return them."""

        def found() -> list[Any] | None:
            messages = [m for p in self.agent.peers for m in p.messages if isinstance(m, kind) and where(m)]
            return messages if len(messages) >= count else None

        return self.agent.wait_until(found, f"{count} x {kind.__name__}")

    def finish(self, *, ok: bool = True, reason: str = "done") -> list[int | None]:
        """Stop the job, and return the ranks' exit codes."""
        self.send(StopJob(job=JOB, ok=ok, reason=reason))
        return [rank.wait().code for rank in self.ranks.values()]


@contextlib.contextmanager
def node_ranks(
    forks: ForkPool, train: Callable[..., None], folder: Path | None = None, **settings: Any
) -> Iterator[NodeRanks]:
    """Yield the ranks of a node, which run a training function that can be pickled. The fork pool ends their processes.

    ``folder``: the folder of the agent's socket, such as a vault's; a temporary one by default.
    """
    with (
        tempfile.TemporaryDirectory(prefix="everstep-") as own,  # short: a socket's path has 107 bytes at most
        fake_agent((folder or Path(own)) / "agent.sock", NODE) as agent,
    ):
        yield NodeRanks(forks, agent, train, settings)
