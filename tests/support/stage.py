"""Real ranks on a stage: forked processes with torch loaded, a real rendezvous store, a fake agent that directs."""

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
from tests.support.fake_agent import FakeAgent, Peer, fake_agent
from tests.support.forked import ForkedChild, ForkPool
from tests.support.generations import JOB, generation
from tests.support.waiting import until

NODE = "n1"


def host_store(port_file: str, port: int = 0) -> None:
    """In a process of its own: a rendezvous store, until it is killed."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    Path(port_file + ".new").write_text(str(store.port))
    os.rename(port_file + ".new", port_file)
    signal.pause()


def play(socket_path: str, local_rank: int, train: Callable[..., None], settings: dict[str, Any]) -> None:
    """In a process of its own: one rank, as everstep-launch would start it."""
    from everstep_trainer.config import HookSettings
    from everstep_trainer.runtime.assignment import WorkerAssignment
    from everstep_trainer.runtime.worker import Worker

    from everstep.system_clock import SYSTEM_CLOCK

    assignment = WorkerAssignment(job=JOB, agent_socket=socket_path, local_rank=local_rank)
    Worker(assignment, HookSettings(backend="gloo", **settings), SYSTEM_CLOCK).run(train)


class Stage:
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
        """Another rendezvous store in a process of its own; its address. ``port``: one that no other has now."""
        port_file = self.agent.path.parent / f"store{len(self._stores)}"
        port_file.unlink(missing_ok=True)
        process = self._forks.start(host_store, str(port_file), port)
        port = until(lambda: port_file.read_text() if port_file.exists() else "", "the store serves")
        address = f"127.0.0.1:{port}"
        self._stores[address] = process
        return address

    def kill_store(self, address: str) -> None:
        self._stores[address].kill()

    def start(self, *local_ranks: int) -> None:
        """Starts ranks and waits until they have said Hello."""
        for local_rank in local_ranks:
            self.ranks[local_rank] = self._forks.start(
                play, str(self.agent.path), local_rank, self._train, self._settings
            )
        for local_rank in local_ranks:
            self.peer(local_rank)

    def peer(self, local_rank: int) -> Peer:
        """The connection of a local rank's process."""
        pid = self.ranks[local_rank].pid
        return self.agent.wait_until(
            lambda: next((p for p in self.agent.peers if p.hello and p.hello.pid == pid), None),
            f"a Hello of local rank {local_rank}",
        )

    def generation(self, number: int, *local_ranks: int, **more: Any) -> GenerationSpec:
        more.setdefault("store", self.store)
        return generation(number, ranks=[(NODE, r) for r in local_ranks], **more)

    def tell(self, message: Any) -> None:
        """Says something to all ranks."""
        for local_rank in self.ranks:
            with contextlib.suppress(OSError):  # it died meanwhile
                self.peer(local_rank).say(message)

    def form(self, number: int, *local_ranks: int, **more: Any) -> GenerationSpec:
        """Tells every rank of a new generation."""
        spec = self.generation(number, *local_ranks, **more)
        self.tell(NewGeneration(spec=spec))
        return spec

    def kill(self, local_rank: int) -> None:
        self.ranks.pop(local_rank).kill()

    def signal(self, local_rank: int, number: signal.Signals) -> None:
        os.kill(self.ranks[local_rank].pid, number)

    def heard(self, kind: type[Any], count: int, *, where: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        """At least ``count`` messages of this kind, once they are there."""

        def there() -> list[Any] | None:
            said = [m for p in self.agent.peers for m in p.messages if isinstance(m, kind) and where(m)]
            return said if len(said) >= count else None

        return self.agent.wait_until(there, f"{count} x {kind.__name__}")

    def finish(self, *, ok: bool = True, reason: str = "done") -> list[int | None]:
        """Stops the job and returns the ranks' exit codes."""
        self.tell(StopJob(job=JOB, ok=ok, reason=reason))
        return [rank.wait().code for rank in self.ranks.values()]


@contextlib.contextmanager
def stage(forks: ForkPool, train: Callable[..., None], folder: Path | None = None, **settings: Any) -> Iterator[Stage]:
    """A stage for ``train``, a module's function. ``folder``: where the agent's socket goes, beside a vault's.

    The processes are the fork pool's, which ends them with the test.
    """
    with (
        tempfile.TemporaryDirectory(prefix="everstep-") as own,  # short: a socket's path has 107 bytes at most
        fake_agent((folder or Path(own)) / "agent.sock", NODE) as agent,
    ):
        yield Stage(forks, agent, train, settings)
