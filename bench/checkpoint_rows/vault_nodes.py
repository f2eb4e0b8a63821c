"""Nodes of a job: a real vault process each, its memory below one directory, and the generations they are told of."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torch._C._distributed_c10d import TCPStore

from everstep.ids import Version
from everstep.layout.vault_status import LOCK_FILE
from everstep.vocabulary import GenerationReason
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1 import local
from everstep.wire.v1.training import GenerationSpec, Holder, JobSpec, RestoreRule
from everstep_agent.vault.settings import VaultSettings, encode_settings
from everstep_controller.core.checkpoints.placement import FailureDomains, place_replicas

JOB = "bench"
SECRET = "00" * 32
DIGEST_INTERVAL = 50
"""The launcher's own default."""
DEADLINE_S = 30.0
SAMPLE_S = 0.02
MEMORY = Path("/dev/shm")
_fleets = itertools.count(1)


class NodeVault:
    """One node's vault, as the agent starts it but without an agent."""

    def __init__(self, base: Path, memory: Path, node: str, streams: int) -> None:
        self.node = node
        self.run_dir, self.segment_dir = base / node, memory / node
        settings = VaultSettings(
            node=node,
            run_dir=self.run_dir,
            segment_dir=self.segment_dir,
            streams=streams,
            die_with_parent=True,
            log_level="error",
        )
        command = [sys.executable, "-m", "everstep_agent.vault.process", encode_settings(settings)]
        self.process = subprocess.Popen(command)
        self.address = ""

    @property
    def socket(self) -> str:
        return str(self.run_dir / "vault.sock")

    def await_ready(self) -> None:
        """Raises RuntimeError where the vault ends, or does not serve in time."""
        end = time.monotonic() + DEADLINE_S
        ready = self.run_dir / "vault.json"
        while not self.address:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the vault of {self.node} does not serve (exit status {self.process.returncode})")
            said = json.loads(ready.read_text()) if ready.exists() else {}
            if said.get("pid") == self.process.pid:
                self.address = said["address"]
            else:
                time.sleep(0.005)

    def ask(self, message: local.ToVault) -> local.FromVault:
        """One request over a connection of its own. Raises RuntimeError where it is refused."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(DEADLINE_S)
            connection.connect(self.socket)
            connection.sendall(encode_frame(message))
            decoder: FrameDecoder[local.FromVault] = FrameDecoder(local.FromVault, local.MAX_FRAME_BYTES)
            while data := connection.recv(1 << 16):
                for answer in decoder.feed(data):
                    if isinstance(answer, local.RequestFailed):
                        raise RuntimeError(f"the vault of {self.node} refuses: {answer.message}")
                    if getattr(answer, "request", None) == message.request:
                        return answer
        raise RuntimeError(f"the vault of {self.node} hung up")

    def statistics(self) -> local.StatisticsAnswer:
        """Return the vault's statistics."""
        answer = self.ask(local.Statistics(request=1))
        assert isinstance(answer, local.StatisticsAnswer)
        return answer

    def kill(self) -> None:
        """The node is gone, and all that its memory held."""
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.segment_dir, ignore_errors=True)


class Fleet:
    """Vaults of some nodes, each in failure domains of its own; a context manager that leaves nothing behind.

    ``memory`` is theirs alone, ``warm`` is for the shared memory that limits are measured with.
    """

    def __init__(self, nodes: Sequence[str], streams: int = 2) -> None:
        self._streams = streams
        self.vaults: dict[str, NodeVault] = {}
        self.number = 0
        own = f"everstep-bench-{os.getpid()}-{next(_fleets)}"
        self._base = Path(tempfile.gettempdir()) / own
        self.memory, self.warm = MEMORY / own, MEMORY / f"{own}-warm"
        atexit.register(self.end)  # a signal may come at any moment, before the block is entered too
        try:
            for folder in (self._base, self.memory, self.warm):
                folder.mkdir(mode=0o700)
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.start(*nodes)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def start(self, *nodes: str) -> None:
        """Empty vaults for these nodes; from the main thread, whose end they follow."""
        started = [NodeVault(self._base, self.memory, node, self._streams) for node in nodes]
        self.vaults |= {vault.node: vault for vault in started}
        for vault in started:
            vault.await_ready()

    def lose(self, *nodes: str) -> None:
        """Nodes that go with their memory."""
        for node in nodes:
            self.vaults[node].process.kill()
        for node in nodes:
            self.vaults.pop(node).kill()

    def end(self) -> None:
        for vault in self.vaults.values():
            vault.kill()
        self.vaults.clear()
        for folder in (self._base, self.memory, self.warm):
            shutil.rmtree(folder, ignore_errors=True)
        atexit.unregister(self.end)

    def generation(self, nodes: Sequence[str], replicas: int, floor: Version | None = None) -> GenerationSpec:
        """The next generation, one rank on each of ``nodes``, told to all vaults. ``floor``: what was committed."""
        self.number += 1
        holders = tuple(Holder(node=vault.node, vault=vault.address) for vault in self.vaults.values())
        sites = {node: FailureDomains(rack=node) for node in nodes}
        spec = GenerationSpec(
            job=JOB,
            number=self.number,
            reason=GenerationReason.FORMED,
            sentence="for a bench",
            trace=f"bench-{self.number}",
            seats=tuple(nodes),
            store=f"127.0.0.1:{self.store.port}",
            store_node=nodes[0],
            restore=RestoreRule(from_scratch=floor is None, floor=floor),
            holders=holders,
            replica_nodes=place_replicas(nodes, sites, replicas),
            secret=SECRET,
            spec=JobSpec(job=JOB, max_nodes=len(nodes), replicas=replicas, digest_interval=DIGEST_INTERVAL),
            issued_at=0.0,
        )
        for vault in self.vaults.values():
            said = local.ConfigureJob(request=1, job=JOB, generation=self.number, secret=SECRET, holders=holders)
            vault.ask(said)
        return spec

    def sockets(self, nodes: Sequence[str]) -> list[str]:
        return [self.vaults[node].socket for node in nodes]

    def stated_bytes(self) -> int:
        """Return the bytes of the vaults' files by their own statistics."""
        return sum(vault.statistics().gauges["segment_bytes"] for vault in self.vaults.values())


class MemoryWatch:
    """The most bytes that files below a directory of memory took at once, looked at every 20 ms."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._over = threading.Event()
        self.most_bytes = 0
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self.most_bytes = max(self.most_bytes, used_bytes(self._directory))


def used_bytes(directory: Path) -> int:
    """Memory that is really taken: blocks, not lengths, and without a vault's note beside its slots."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in (name for name in names if name != LOCK_FILE):
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
