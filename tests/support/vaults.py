"""Real vault processes for tests, and a plain blocking client for their unix sockets."""

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

from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK, SegmentView
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1 import local
from everstep.wire.v1.training import Holder, PeerConnectionLost
from tests.support.forked import ForkPool
from tests.support.programs import Forked
from tests.support.waiting import until

JOB = "job"
SECRET = "a secret of the job, for tests"
DEADLINE_S = 60.0


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
        """Sends a request without waiting; returns its number."""
        self._next += 1
        self._sock.sendall(encode_frame(kind(request=self._next, **fields)))
        return self._next

    def wait(self, request: int) -> local.FromVault:
        while request not in self._answers:
            self._receive()
        return self._answers.pop(request)

    def ask(self, kind: Callable[..., local.ToVault], **fields: object) -> local.FromVault:
        return self.wait(self.post(kind, **fields))

    def finding(self) -> local.VaultFinding:
        """The next finding, waited for."""
        while not self.findings:
            self._receive()
        return self.findings.pop(0)

    def peer_lost(self) -> PeerConnectionLost:
        """The next word of a peer that is gone, waited for."""
        while not self.peers_lost:
            self._receive()
        return self.peers_lost.pop(0)

    def raw(self, data: bytes) -> None:
        self._sock.sendall(data)

    def closed(self) -> bool:
        """Waits for the vault to close the connection, past whatever it still sends."""
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
    """The settings of a vault as its command line holds them. ``options``: such as ("--linger-s", "0.5")."""
    chosen: dict[str, object] = {"node": node, "run_dir": str(run_dir), "segment_dir": str(segment_dir)}
    for name, value in zip(options[::2], options[1::2], strict=True):
        chosen[name.removeprefix("--").replace("-", "_")] = plain_value(value)
    return json.dumps(chosen)


def plain_value(text: str) -> object:
    """``text`` as JSON if it is that, such as a number or true; otherwise itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class VaultProcess:
    """A vault started by its command line, or forked with it. ``module``: what is run when it starts again."""

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
        self.process: subprocess.Popen[bytes] | Forked
        if self._forks is None:
            self.process = subprocess.Popen([sys.executable, "-m", self.module, *arguments])
        else:
            self.process = Forked(self._forks, self.module, arguments)
        ready = self.run_dir / "vault.json"

        def said() -> str:
            assert self.process.poll() is None, f"the vault of {self.node} ended with {self.process.returncode}"
            word = json.loads(ready.read_text()) if ready.exists() else {}
            return str(word["address"]) if word.get("pid") == self.process.pid else ""

        self.address = until(said, f"the vault of {self.node} serves")

    def client(self) -> VaultClient:
        client = VaultClient(self.run_dir / "vault.sock")
        self._clients.append(client)
        return client

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """SIGSTOP, and waits until it holds: the kernel stops all threads when the one that it chose runs next."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        until(
            lambda: all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir()),
            f"the vault of {self.node} stands still",
        )

    def end(self) -> int:
        """An orderly end; the exit status."""
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
    """Vaults of several nodes, under directories that go with the test."""

    def __init__(self, base: Path, segments: Path, forks: ForkPool | None = None) -> None:
        self.base = base
        self.segments = segments
        self.forks = forks
        self.all: list[VaultProcess] = []
        self.supervisors: dict[str, VaultClient] = {}

    def start(self, node: str, *options: str) -> VaultProcess:
        given = options or ("--scrub-interval-s", "0")
        vault = VaultProcess(self.base, self.segments, node, *given, forks=self.forks)
        self.all.append(vault)
        return vault

    def holders(self) -> tuple[Holder, ...]:
        return tuple(Holder(node=v.node, vault=v.address) for v in self.all)

    def configure(self, *vaults: VaultProcess, generation: int = 1, **fields: object) -> dict[str, VaultClient]:
        """A supervisor's connection to each vault (all by default), which has told it of the job."""
        clients = {}
        for vault in vaults or self.all:
            client = clients[vault.node] = vault.client()
            said = {"job": JOB, "generation": generation, "secret": SECRET, "holders": self.holders(), **fields}
            answer = client.ask(local.ConfigureJob, **said)
            assert isinstance(answer, local.RequestDone), answer
        self.supervisors |= clients
        return clients


@contextmanager
def vaults(forks: ForkPool | None = None) -> Iterator[Vaults]:
    """Vaults whose processes and memory are gone afterwards, whatever happened. ``forks``: where they come from;
    without it they are started as an agent does."""
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
    """n1 and n2, which know of the job and of each other."""
    with vaults(forks) as running:
        running.start("n1"), running.start("n2")
        running.configure()
        yield running


class RankMemory:
    """What a rank does with its segment: open it through the vault, map it, fill slots."""

    def __init__(self, client: VaultClient, rank: int, local_rank: int = 0, slot_bytes: int = 1 << 20) -> None:
        self.client, self.rank, self.local_rank = client, rank, local_rank
        opened = client.ask(
            local.OpenSegment, job=JOB, local_rank=local_rank, slot_bytes=slot_bytes, slots=SLOTS_PER_RANK
        )
        assert isinstance(opened, local.SegmentOpened), opened
        self.path = Path(opened.path)
        self.view = map_segment(self.path)

    def fill(self, slot: int, version: Version, payload: bytes, manifest: bytes = b"what is where") -> None:
        """A sealed slot."""
        self.copy(slot, version, payload, manifest)
        self.view.seal(slot)

    def copy(self, slot: int, version: Version, payload: bytes, manifest: bytes = b"what is where") -> None:
        """A slot as a rank leaves it that dies before it has hashed it."""
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


def map_segment(path: Path) -> SegmentView:
    """A segment file, writable."""
    with path.open("r+b") as file:
        return SegmentView(memoryview(mmap.mmap(file.fileno(), 0)))


def noise(count: int, seed: int = 1) -> bytes:
    """Bytes that repeat nowhere within a chunk."""
    import random

    return random.Random(seed).randbytes(count)


def shared_memory_left(fleet: Vaults) -> list[str]:
    """Files under the fleet's segment directory."""
    return [str(p) for p in fleet.segments.rglob("*") if p.is_file()]


def process_gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")
