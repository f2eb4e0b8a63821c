"""The measured rank: it stores and restores a state whose values encode its step."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from bench.checkpoint_rows.limits import WarmMemory
from bench.checkpoint_rows.state import Model, Size
from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.slots import CHUNK_BYTES, SLOTS_PER_RANK
from everstep.wire.v1.local import SlotSealed
from everstep.wire.v1.training import FindingRaised, GenerationSpec, VersionSealed
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState

PRODUCT = 768
"""Size of the square matrices whose products are a step's compute. They stay in the cache of one core."""
FEW = 64
"""With more tensors the reference is one memcpy of all bytes, since a loop over tensors costs more than the copy."""
WARM_UPS = 6
"""Number of snapshots before the measurement, in which each slot is written once."""
WARM_UP_S, SEAL_S = 180.0, 60.0


@dataclass
class Stalls:
    """Seconds of each snapshot.

    ``memcpy``: copying the same bytes. ``blocked``: ``begin`` and ``wait`` of the training thread without compute
    between them. ``under``: the same with compute between them. ``sealed``: from ``begin`` to the report that a
    candidate is sealed and copied to other nodes. ``back_to_back``: a snapshot without anything else.
    """

    nbytes: int
    replicas: tuple[str, ...] = ()
    memcpy: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    under: list[float] = field(default_factory=list)
    sealed: list[float] = field(default_factory=list)
    back_to_back: float = 0.0
    last: int = 0


@dataclass
class Restores:
    """Seconds of each restore: ``memcpy`` of the same bytes, and the whole ``fill``; and bytes by source."""

    memcpy: list[float] = field(default_factory=list)
    fill: list[float] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)


class Rank:
    """One rank of a generation with its vault, its store, and a process group if there are several ranks."""

    def __init__(self, spec: GenerationSpec, rank: int, socket: str, stack: ExitStack) -> None:
        self.spec, self.member = spec, spec.roster[rank]
        torch.set_num_threads(1)
        self.vault = VaultClient(socket)
        stack.callback(self.vault.close)
        self.store: Store = HashStore()
        if spec.world_size > 1:
            host, port = spec.store.split(":")
            base = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=120), wait_for_workers=False)
            self.store = PrefixStore(f"g{spec.number}", base)
            dist.init_process_group("gloo", store=self.store, rank=rank, world_size=spec.world_size)
            stack.callback(dist.destroy_process_group)

    def meet(self) -> None:
        """Wait for all ranks."""
        if self.spec.world_size > 1:
            dist.barrier()


class Heard:
    """The reports of sealed shares. ``wait`` waits for the report of a step."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.at: dict[int, float] = {}
        self.last: VersionSealed | None = None

    def hear(self, report: VersionSealed | FindingRaised) -> None:
        if not isinstance(report, VersionSealed):  # a finding on missing memory, which is also logged
            return
        with self._changed:
            self.at[report.version.step] = time.perf_counter()
            self.last = report
            self._changed.notify_all()

    def wait(self, step: int, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: step in self.at, timeout_s)


def snapshots(
    spec: GenerationSpec,
    rank: int,
    socket: str,
    memory: str,
    size: Size,
    repeats: int,
    compute_s: float,
    overlap: bool | None = None,
    slots: int = SLOTS_PER_RANK,
) -> Stalls:
    """Measure the snapshots of a rank in a generation of its own, after some warm-up snapshots.

    ``compute_s``: seconds of compute in a step without a copy. ``slots``: slots of a segment. With two slots every
    version is announced as a candidate, since others are not stored.
    """
    with ExitStack() as stack:
        one = Rank(spec, rank, socket, stack)
        storing = _Storing(one, Model(size), stack, SnapshotOptions(overlap=overlap, slots=slots))
        model, last = storing.model, storing.heard.last
        assert last is not None
        nbytes = min(sum(part.nbytes for part in model.parts), last.bytes)
        arrays = model.arrays() if size.tensors <= FEW else [np.ones(nbytes, np.uint8)]
        reference = WarmMemory(Path(memory), arrays, nbytes)
        stalls, work = Stalls(reference.nbytes, last.full_copies), _Work(compute_s)
        for _ in range(repeats):
            storing.without_compute(reference, stalls)
        for _ in range(repeats):
            storing.under_compute(work, stalls)
        storing.back_to_back(stalls, max(3, repeats))
        stalls.last = storing.step
        one.meet()
        return stalls


def lean(spec: GenerationSpec, rank: int, socket: str, size: Size) -> int:
    """Store candidates with two slots for each rank, and return the last step."""
    with ExitStack() as stack:
        return _Storing(Rank(spec, rank, socket, stack), Model(size), stack, SnapshotOptions(slots=2)).step


class _Refusals(logging.Handler):
    """Record a vault's refusal for lack of memory, after which no later step can succeed."""

    reason = ""

    def emit(self, record: logging.LogRecord) -> None:
        for value in record.args if isinstance(record.args, tuple) else ():
            if isinstance(value, OutOfSlotMemory):
                self.reason = str(value)


class _Storing:
    """A rank that stores one step after another. ``step``: the last one."""

    def __init__(self, one: Rank, model: Model, stack: ExitStack, choices: SnapshotOptions) -> None:
        self.one, self.model, self.heard, self.step = one, model, Heard(), 0
        model.update(0)
        state = TrackedState({"model": model.module})
        hear = self.heard.hear
        self.snapshotter = Snapshotter(one.vault, state, one.spec, one.member, one.store, hear, options=choices)
        stack.callback(self.snapshotter.close, finish=True)
        refused, done, deadline = _Refusals(), 0, time.monotonic() + WARM_UP_S
        logging.getLogger("everstep_trainer").addHandler(refused)
        while done < WARM_UPS:  # until all ranks have sealed some: segments exist and their pages are mapped
            assert not refused.reason, refused.reason
            assert time.monotonic() < deadline, "no snapshot was sealed"
            self.snapshotter.wait()
            self._snapshot(is_candidate=True)
            mine = torch.tensor(float(self.heard.wait(self.step, 5.0)))
            if one.spec.world_size > 1:
                dist.all_reduce(mine, dist.ReduceOp.MIN)
            done += int(mine.item())

    def _next(self, *, is_candidate: bool) -> None:
        """Update the model in the next step. With few slots each step is announced as a candidate."""
        self.step += 1
        self.model.update(self.step)
        self.one.meet()
        if is_candidate or not self.snapshotter.interval_at(self.step):
            self.snapshotter.update_versions(None, self.step)

    def _snapshot(self, *, is_candidate: bool = False) -> tuple[float, float]:
        """Return the time at which a snapshot began, and the seconds for which it blocked the training thread."""
        self._next(is_candidate=is_candidate)
        began = time.perf_counter()
        self.snapshotter.begin(self.step)
        self.snapshotter.wait()
        return began, time.perf_counter() - began

    def without_compute(self, reference: WarmMemory, stalls: Stalls) -> None:
        """Measure snapshots for which the training thread waits at once, after the last one is sealed and copied."""
        self.one.meet()
        stalls.memcpy.append(reference.store_s())
        stalls.blocked.append(self._snapshot()[1])
        await_seal(self.one, self.step)
        began, _ = self._snapshot(is_candidate=True)
        assert self.heard.wait(self.step, SEAL_S), f"step {self.step} was not sealed"
        stalls.sealed.append(self.heard.at[self.step] - began)

    def under_compute(self, work: _Work, stalls: Stalls) -> None:
        """Measure a copy during the next step's compute."""
        self._next(is_candidate=False)
        began = time.perf_counter()
        self.snapshotter.begin(self.step)
        begun = time.perf_counter() - began
        work.run_s()
        waits = time.perf_counter()
        self.snapshotter.wait()
        stalls.under.append(begun + time.perf_counter() - waits)
        await_seal(self.one, self.step)

    def back_to_back(self, stalls: Stalls, count: int) -> None:
        """Measure consecutive snapshots of an unchanged state: copy, hash, seal, and copies to other nodes."""
        self.model.update(self.step + count)
        self.one.meet()
        began = time.perf_counter()
        for _ in range(count):
            self.step += 1
            self.snapshotter.update_versions(None, self.step)
            self.snapshotter.begin(self.step)
            self.snapshotter.wait()
        assert self.heard.wait(self.step, SEAL_S), f"step {self.step} was not sealed"
        stalls.back_to_back = (time.perf_counter() - began) / count


def await_seal(one: Rank, step: int) -> None:
    """Wait until a version is sealed, by its slot, since only candidates are reported."""
    view = one.vault.open_segment(one.spec.job, one.member.local_rank, 1, slots=1).view
    deadline = time.monotonic() + SEAL_S
    while all(header.version != Version(one.spec.number, step) for _, header in view.sealed_slots()):
        assert time.monotonic() < deadline, f"step {step} was not sealed"
        time.sleep(0.001)


class _Work:
    """Compute for about ``seconds`` on one core, with the same work at each call."""

    def __init__(self, seconds: float) -> None:
        self._a, self._b = torch.ones(PRODUCT, PRODUCT), torch.ones(PRODUCT, PRODUCT)
        self._out = torch.empty(PRODUCT, PRODUCT)
        self._times = 1
        self.run_s()
        self._times = 10
        each_s = self.run_s() / self._times
        self._times = max(1, round(seconds / each_s))

    def run_s(self) -> float:
        began = time.perf_counter()
        for _ in range(self._times):
            torch.mm(self._a, self._b, out=self._out)
        return time.perf_counter() - began


def restores(
    spec: GenerationSpec, rank: int, socket: str, memory: str, size: Size, repeats: int, step: int
) -> Restores:
    """Restore the state ``repeats`` times from the vaults, which must hold ``step``."""
    with ExitStack() as stack:
        one = Rank(spec, rank, socket, stack)
        model = Model(size)
        model.spoil()
        reference = WarmMemory(Path(memory), model.arrays(), sum(array.nbytes for array in model.arrays()))
        measured = Restores()
        for number in range(repeats):
            one.meet()
            measured.memcpy.append(reference.load_s())
            model.spoil()
            state = TrackedState({"model": model.module})
            store = PrefixStore(f"restore-{number}", one.store)
            one.meet()
            began = time.perf_counter()
            restoration = Restoration(one.vault, spec, one.member, store)
            result = restoration.fill(state)
            measured.fill.append(time.perf_counter() - began)
            restoration.close()
            measured.sources = dict(result.bytes_by_source)
            assert result.step == step, f"{result.version} was restored, not step {step}: {result.sentence}"
            model.require(step)
        one.meet()
        return measured


def replications(spec: GenerationSpec, socket: str, nbytes: int, to: str, repeats: int) -> list[float]:
    """Return seconds from the report of a sealed slot of ``nbytes`` to the vault until ``to`` acknowledges its copy."""
    vault = VaultClient(socket)
    try:
        segment = vault.open_segment(spec.job, 0, nbytes + (1 << 20), slots=2)
        took = []
        for number in range(repeats + 2):
            version, slot = Version(spec.number, number + 1), number % 2
            payload = segment.view.begin(slot, 0, version, b"a manifest", nbytes)
            for chunk in range(0, nbytes, CHUNK_BYTES):  # every chunk differs from the peer's copy
                payload[chunk : chunk + 8] = number.to_bytes(8, "little")
            segment.view.seal(slot)
            began = time.perf_counter()
            answer = vault.report_sealed(
                SlotSealed(
                    request=0,
                    job=spec.job,
                    generation=spec.number,
                    rank=0,
                    local_rank=0,
                    slot=slot,
                    version=version,
                    replicate_ranges=((0, nbytes),),
                    replica_nodes=(to,),
                )
            ).result()
            took.append(time.perf_counter() - began)
            assert answer.nodes == (to,), answer.failed
        return took
    finally:
        vault.close()
