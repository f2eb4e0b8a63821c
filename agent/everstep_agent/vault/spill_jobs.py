"""Run spills of versions to storage: find the slots, collect the other nodes' shares, start the writer process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from everstep import errors
from everstep.wire.v1.local import RequestFailed, Spill, Spilled
from everstep_agent.spill.order import SlotSource, SpillOrder
from everstep_agent.vault.parity.shards import ShardLocation, ShardWorker, require_all


@dataclass(eq=False)
class Spiller(ShardWorker):
    """Answer Spill requests one after another in ``executor``; ``streams`` asks other nodes side by side."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._running_writer: tuple[str, subprocess.Popen[bytes]] | None = None
        # one thread: the writer process ends with the thread that started it
        self.executor = ThreadPoolExecutor(1, "spill")

    def spill(self, request: Spill) -> Spilled:
        """Write this node's part of the version; parts written before are not written again. Raises EverstepError."""
        self.job_table.require_current(request.job, request.generation)
        sources = tuple(self._find_slot(request, rank) for rank in request.writers.get(self.node, ()))
        writers = [(node, rank) for node, ranks in request.writers.items() for rank in ranks]
        locations = [ShardLocation(request.job, node, rank, request.version) for node, rank in writers]
        infos = require_all(self.read_infos(locations))
        manifests = {rank: info.manifest for (_, rank), info in zip(writers, infos, strict=True)}
        order = SpillOrder(
            url=request.url,
            version=request.version,
            sources=sources,
            manifests=manifests,
            keep=request.keep_last,
            earlier=request.earlier,
        )
        outcome = self._run_writer(request.job, order)
        self.counters.add("spilled_slots", len(sources))
        self.counters.add("spilled_bytes", outcome.bytes)
        return msgspec.structs.replace(outcome, request=request.request)

    def _find_slot(self, request: Spill, rank: int) -> SlotSource:
        for segment, slot, _ in self.store.find(request.job, rank, request.version):
            return SlotSource(rank=rank, path=str(segment.path), slot=slot)
        raise errors.NotFound(
            f"no sealed slot on this node holds version {request.version} of rank {rank} of job {request.job}"
        )

    def _run_writer(self, job: str, order: SpillOrder) -> Spilled:
        command = [sys.executable, "-P", "-m", "everstep_agent.spill", str(os.getpid())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
            with self._lock:
                self._running_writer = job, writer
            try:
                output, _ = writer.communicate(msgspec.msgpack.encode(order))
            finally:
                with self._lock:
                    self._running_writer = None
        try:
            answer = msgspec.json.decode(output, type=Spilled | RequestFailed)
        except errors.DECODE_ERRORS as error:
            raise errors.Unavailable(f"the checkpoint writer ended with status {writer.returncode}") from error
        if isinstance(answer, RequestFailed):
            raise errors.BY_CODE.get(answer.code, errors.EverstepError)(answer.message)
        return answer

    def cancel(self, job: str | None = None) -> None:
        """Kill the writer of the job, or of any job."""
        with self._lock:
            if self._running_writer is not None and job in (None, self._running_writer[0]):
                self._running_writer[1].kill()

    def close(self) -> None:
        """Kill the writer and accept no more spills."""
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.cancel()
