"""Vault processes, a blocking client of their unix sockets, and the memory of ranks in them."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK, SegmentView
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1 import local
from everstep.wire.v1.training import Holder, PeerConnectionLost
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.forked_programs import ForkedProgram
from tests.support.processes.waiting import until

JOB = "job"
SECRET = "a secret of the job, for tests"
DEADLINE_S = 60.0

Answer = TypeVar("Answer", bound=local.FromVault)


def expect(answer: local.FromVault, kind: type[Answer]) -> Answer:
    """Return the answer after a check of its type."""
    assert isinstance(answer, kind), answer
    return answer


class VaultClient:
    """One connection to ``vault.sock``."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(DEADLINE_S)
        self._sock.connect(str(path))
        self._frames: FrameDecoder[local.FromVault] = FrameDecoder(local.FromVault, local.MAX_FRAME_BYTES)
        self._answers: dict[int, local.FromVault] = {}
        self.findings: list[local.VaultFinding] = []
        self.peers_lost: list[PeerConnectionLost] = []
        self._next = 0

    def post(self, kind: Callable[..., local.ToVault], **fields: object) -> int:
        """Send a request without waiting, and return its number."""
        self._next += 1
        self._sock.sendall(encode_frame(kind(request=self._next, **fields)))
        return self._next

    def wait(self, request: int) -> local.FromVault:
        while request not in self._answers:
            self._receive()
        return self._answers.pop(request)

    def ask(self, kind: Callable[..., local.ToVault], **fields: object) -> local.FromVault:
        return self.wait(self.post(kind, **fields))

    def statistics(self) -> local.StatisticsAnswer:
        return expect(self.ask(local.Statistics), local.StatisticsAnswer)

    def inventory(self, **fields: object) -> local.InventoryAnswer:
        """Ask for the slots of the job. ``fields``: more fields of the request."""
        return expect(self.ask(local.Inventory, job=JOB, **fields), local.InventoryAnswer)

    def finding(self) -> local.VaultFinding:
        """Wait for the next finding."""
        while not self.findings:
            self._receive()
        return self.findings.pop(0)

    def peer_lost(self) -> PeerConnectionLost:
        """Wait for the next report of a lost peer."""
        while not self.peers_lost:
            self._receive()
        return self.peers_lost.pop(0)

    def raw(self, data: bytes) -> None:
        self._sock.sendall(data)

    def closed(self) -> bool:
        """Wait for the vault to close the connection, and discard its last messages."""
        while self._sock.recv(65536):
            pass
        return True

    def _receive(self) -> None:
        data = self._sock.recv(1 << 16)
        assert data, "the vault closed the connection"
        for message in self._frames.feed(data):
            if isinstance(message, local.VaultFinding):
                self.findings.append(message)
            elif isinstance(message, PeerConnectionLost):
                self.peers_lost.append(message)
            else:
                self._answers[message.request] = message

    def close(self) -> None:
        self._sock.close()


def vault_settings(node: str, run_dir: Path, segment_dir: Path, *options: str) -> str:
    """Return the settings of a vault as on its command line. ``options``: such as ("--linger-s", "0.5")."""
    chosen: dict[str, object] = {"node": node, "run_dir": str(run_dir), "segment_dir": str(segment_dir)}
    for name, value in zip(options[::2], options[1::2], strict=True):
        chosen[name.removeprefix("--").replace("-", "_")] = plain_value(value)
    return json.dumps(chosen)


def plain_value(text: str) -> object:
    """Decode ``text`` as JSON, such as a number or true; return other text unchanged."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class VaultProcess:
    """A vault started by its command line, or forked with it. ``module``: the module to run at the next start."""

    def __init__(self, base: Path, segments: Path, node: str, *options: str, forks: ForkPool | None = None) -> None:
        self.node = node
        self._forks = forks
        self.run_dir = base / node
        self.segment_dir = segments / node
        self._options = options
        self._clients: list[VaultClient] = []
        self.address = ""
        self.module = "everstep_agent.vault.process"
        self.start()

    def start(self, *more: str) -> None:
        arguments = [vault_settings(self.node, self.run_dir, self.segment_dir, *self._options, *more)]
        self.process: subprocess.Popen[bytes] | ForkedProgram
        if self._forks is None:
            self.process = subprocess.Popen([sys.executable, "-m", self.module, *arguments])
        else:
            self.process = ForkedProgram(self._forks, self.module, arguments)
        ready = self.run_dir / "vault.json"

        def address() -> str:
            assert self.process.poll() is None, f"the vault of {self.node} ended with {self.process.returncode}"
            status = json.loads(ready.read_text()) if ready.exists() else {}
            return str(status["address"]) if status.get("pid") == self.process.pid else ""

        self.address = until(address, f"the vault of {self.node} serves")

    def client(self) -> VaultClient:
        client = VaultClient(self.run_dir / "vault.sock")
        self._clients.append(client)
        return client

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the vault by SIGSTOP, and wait until all its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until(
            lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()),
            f"the vault of {self.node} has stopped",
        )

    def end(self) -> int:
        """Terminate the vault, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


class Vaults:
    """Vaults of several nodes in temporary directories."""

    def __init__(self, base: Path, segments: Path, forks: ForkPool | None = None) -> None:
        self.base = base
        self.segments = segments
        self.forks = forks
        self.all: list[VaultProcess] = []
        self.supervisors: dict[str, VaultClient] = {}

    def start(self, node: str, *options: str) -> VaultProcess:
        vault_options = options or ("--scrub-interval-s", "0")
        vault = VaultProcess(self.base, self.segments, node, *vault_options, forks=self.forks)
        self.all.append(vault)
        return vault

    def holders(self) -> tuple[Holder, ...]:
        return tuple(Holder(node=v.node, vault=v.address) for v in self.all)

    def configure(self, *vaults: VaultProcess, generation: int = 1, **fields: object) -> dict[str, VaultClient]:
        """Configure the job in each vault (all by default) over a supervisor's connection."""
        clients = {}
        for vault in vaults or self.all:
            client = clients[vault.node] = vault.client()
            values = {"job": JOB, "generation": generation, "secret": SECRET, "holders": self.holders(), **fields}
            answer = client.ask(local.ConfigureJob, **values)
            assert isinstance(answer, local.RequestDone), answer
        self.supervisors |= clients
        return clients


@contextmanager
def vaults(forks: ForkPool | None = None) -> Iterator[Vaults]:
    """Yield vaults without any node yet, and remove all processes and their memory afterwards.

    ``forks``: the pool that forks the vaults; without it they are started by their command lines.
    """
    base = Path(tempfile.mkdtemp(prefix="ev-"))
    segments = Path(tempfile.mkdtemp(prefix="everstep-test-", dir="/dev/shm"))
    fleet = Vaults(base, segments, forks)
    try:
        yield fleet
    finally:
        for vault in fleet.all:
            vault.close()
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(segments, ignore_errors=True)


@contextmanager
def two_vaults(forks: ForkPool) -> Iterator[Vaults]:
    """Yield the vaults n1 and n2, configured with the job and with each other."""
    with vaults(forks) as running:
        running.start("n1"), running.start("n2")
        running.configure()
        yield running


class RankMemory:
    """A rank's segment, which the vault has opened, mapped into this process."""

    def __init__(self, client: VaultClient, rank: int, local_rank: int = 0, slot_bytes: int = 1 << 20) -> None:
        self.client, self.rank, self.local_rank = client, rank, local_rank
        opened = client.ask(
            local.OpenSegment, job=JOB, local_rank=local_rank, slot_bytes=slot_bytes, slots=SLOTS_PER_RANK
        )
        assert isinstance(opened, local.SegmentOpened), opened
        self.path = Path(opened.path)
        self.view = map_segment(self.path)

    def fill(self, slot: int, version: Version, payload: bytes, manifest: bytes = b"manifest") -> None:
        """Fill and seal a slot."""
        self.copy(slot, version, payload, manifest)
        self.view.seal(slot)

    def copy(self, slot: int, version: Version, payload: bytes, manifest: bytes = b"manifest") -> None:
        """Fill a slot without sealing it, as a rank that is killed before hashing."""
        self.view.begin(slot, self.rank, version, manifest, len(payload))[:] = payload
        self.view.mark_copied(slot)

    def post_sealed(
        self,
        slot: int,
        version: Version,
        to: Sequence[str],
        generation: int = 1,
        keep: Sequence[Version] = (),
        kept: bool = False,
    ) -> int:
        return self.client.post(
            local.SlotSealed,
            job=JOB,
            generation=generation,
            rank=self.rank,
            local_rank=self.local_rank,
            slot=slot,
            version=version,
            replicate_ranges=((0, 1),) if to else (),
            replica_nodes=tuple(to),
            keep=tuple(keep),
            commit_candidate=kept,
        )

    def sealed(
        self, slot: int, version: Version, to: Sequence[str], generation: int = 1, keep: Sequence[Version] = ()
    ) -> local.FromVault:
        return self.client.wait(self.post_sealed(slot, version, to, generation, keep))

    def replicated(
        self, slot: int, version: Version, to: Sequence[str], generation: int = 1, keep: Sequence[Version] = ()
    ) -> local.Replicated:
        """Report a sealed slot that the vault accepts, and wait for the end of its replication."""
        return expect(self.sealed(slot, version, to, generation, keep), local.Replicated)


def map_segment(path: Path) -> SegmentView:
    """Map a segment file for writing."""
    with path.open("r+b") as file:
        return SegmentView(memoryview(mmap.mmap(file.fileno(), 0)))


def noise(count: int, seed: int = 1) -> bytes:
    """Return bytes without repetitions within a chunk."""
    import random

    return random.Random(seed).randbytes(count)


def shared_memory_left(fleet: Vaults) -> list[str]:
    """Return the files under the fleet's segment directory."""
    return [str(p) for p in fleet.segments.rglob("*") if p.is_file()]


def process_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")
