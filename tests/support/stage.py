"""Real ranks on a stage: forked processes with torch loaded, a real rendezvous store, a fake agent that directs."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from everstep.wire.v1.directives import NewGeneration, StopJob
from everstep.wire.v1.training import GenerationSpec
from tests.support.fake_agent import FakeAgent, Peer, fake_agent
from tests.support.generations import JOB, generation

NODE = "n1"
DEADLINE_S = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["trainer_hooks.launch.preload", "trainer_hooks.entry", "tests.support.training"])


def _host_store(port: Connection) -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port.send(store.port)
    signal.pause()


def _play(socket_path: str, local_rank: int, train: Callable[..., None], settings: dict[str, Any]) -> None:
    from everstep.system_clock import SYSTEM_CLOCK
    from trainer_hooks.assignment import Assignment
    from trainer_hooks.config import HookSettings
    from trainer_hooks.worker import Worker

    assignment = Assignment(
        job=JOB, agent_socket=socket_path, local_rank=local_rank, nproc_per_node=4, launcher_pid=os.getppid()
    )
    Worker(assignment, HookSettings(backend="gloo", **settings), SYSTEM_CLOCK).work(train)


class Stage:
    """Ranks of one node, by local rank. ``settings`` are those of HookSettings."""

    def __init__(self, agent: FakeAgent, train: Callable[..., None], settings: dict[str, Any]) -> None:
        self.agent = agent
        self.ranks: dict[int, ForkServerProcess] = {}
        self._train = train
        self._settings = settings
        self._stores: list[ForkServerProcess] = []
        self.store = self.new_store()

    def new_store(self) -> str:
        """Another rendezvous store in a process of its own; its address."""
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_host_store, args=(theirs,), daemon=True)
        process.start()
        self._stores.append(process)
        with ours, theirs:
            assert ours.poll(DEADLINE_S), "the store did not start"
            return f"127.0.0.1:{ours.recv()}"

    def kill_store(self, number: int = 0) -> None:
        self._stores[number].kill()
        self._stores[number].join()

    def start(self, *local_ranks: int) -> None:
        """Starts ranks and waits until they have said Hello."""
        for local_rank in local_ranks:
            process = _context.Process(
                target=_play, args=(str(self.agent.path), local_rank, self._train, self._settings), daemon=True
            )
            process.start()
            self.ranks[local_rank] = process
        for local_rank in local_ranks:
            self.peer(local_rank)

    def peer(self, local_rank: int) -> Peer:
        """The living connection of a local rank."""
        pid = self.ranks[local_rank].pid

        def there() -> Peer | None:
            return next((p for p in self.agent.peers if p.hello and p.hello.pid == pid and not p.closed), None)

        return self.agent.wait_until(there, f"a Hello of local rank {local_rank}")

    def generation(self, number: int, *local_ranks: int, **more: Any) -> GenerationSpec:
        more.setdefault("store", self.store)
        return generation(number, ranks=[(NODE, r) for r in local_ranks], **more)

    def tell(self, message: Any, *local_ranks: int) -> None:
        """Says something to these ranks; to all that live where none is named."""
        for local_rank in local_ranks or self.ranks:
            with contextlib.suppress(OSError):  # it died meanwhile
                self.peer(local_rank).say(message)

    def form(self, number: int, *local_ranks: int, **more: Any) -> GenerationSpec:
        """Tells every living rank of a new generation."""
        spec = self.generation(number, *local_ranks, **more)
        self.tell(NewGeneration(spec=spec))
        return spec

    def kill(self, local_rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        process = self.ranks[local_rank]
        assert process.pid is not None
        os.kill(process.pid, number)
        if number == signal.SIGKILL:
            process.join()
            del self.ranks[local_rank]

    def heard(self, kind: type[Any], count: int, *, where: Callable[[Any], bool] = lambda _: True) -> list[Any]:
        """At least ``count`` messages of this kind, once they are there."""

        def there() -> list[Any] | None:
            said = [m for p in self.agent.peers for m in p.messages if isinstance(m, kind) and where(m)]
            return said if len(said) >= count else None

        return self.agent.wait_until(there, f"{count} x {kind.__name__}")

    def finish(self, *, ok: bool = True, reason: str = "done") -> list[int | None]:
        """Stops the job and returns the ranks' exit codes."""
        self.tell(StopJob(job=JOB, ok=ok, reason=reason))
        return self.exit_codes()

    def exit_codes(self) -> list[int | None]:
        for process in self.ranks.values():
            process.join(DEADLINE_S)
        return [process.exitcode for process in self.ranks.values()]

    def clear(self) -> None:
        for process in [*self.ranks.values(), *self._stores]:
            process.kill()
            process.join()
            process.close()


@contextlib.contextmanager
def stage(train: Callable[..., None], **settings: Any) -> Iterator[Stage]:
    """A stage for ``train``, a function of tests.support.training; everything on it is gone after the block."""
    with (
        tempfile.TemporaryDirectory(prefix="everstep-") as folder,  # short: a socket's path has 107 bytes at most
        fake_agent(Path(folder) / "agent.sock", NODE) as agent,
    ):
        scene = Stage(agent, train, settings)
        try:
            yield scene
        finally:
            scene.clear()
