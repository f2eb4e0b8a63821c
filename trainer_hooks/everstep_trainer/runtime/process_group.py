"""Join and leave a generation's process group within the same process."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property, partial, wraps
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from everstep.ids import split_address
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_trainer.base.interrupt import Regroup, poll_or_regroup, wait_or_regroup
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime import abort
from everstep_trainer.runtime.abort import GlooBackend

# ---- device meshes of a process that changes its rank
#
# torch caches what it worked out for an operation on DTensors by the meshes of its inputs, and compares meshes by their
# ranks only. After a regrouping that changes this process's rank, or the layout and with it the names of the groups,
# the first ``detach`` of a parameter would return a mesh of an older generation: with another rank's offsets, and with
# names of groups that this process has left.
#
# A mesh has a field that tells apart ranks that are threads of one process, and takes part in comparisons. The rank and
# the names of the groups go there. A process that keeps both keeps torch's cache, which saves about 0.1 s in its first
# step.

_original_init = DeviceMesh.__init__
_numbers: dict[tuple[object, ...], int] = {}


@wraps(_original_init)
def _init_for_rank(mesh: DeviceMesh, /, *args: Any, **options: Any) -> None:
    _original_init(mesh, *args, **options)
    if mesh._thread_id is None and dist.is_initialized():
        mesh._thread_id = _number_of(mesh)
        mesh._hash = None


def _number_of(mesh: DeviceMesh) -> int:
    """Return one number per rank and set of groups; a submesh has its root's groups and possibly more."""
    root = mesh._get_root_mesh()
    groups = tuple(getattr(mesh, "_dim_group_names", ()))
    of_root = None if root is mesh else root._thread_id
    return _numbers.setdefault((dist.get_rank(), of_root, groups), len(_numbers))


def patch_mesh_equality() -> None:
    """Make meshes of this process equal only if ranks, this process's rank and the names of the groups are equal."""
    DeviceMesh.__init__ = _init_for_rank  # type: ignore[method-assign, assignment]


logger = logging.getLogger(__name__)

CONNECT_RETRY_S = 0.01
CONNECT_TIMEOUT_S = 2.0
RELEASE_TIMEOUT_S = 0.5
ABORT_WAIT_S = 5.0  # for a communicator's abort: destroying its group first would wait for the hung operation
BOUNDARY_JOIN_S = 3600.0  # for the members of a generation that begins at a step boundary: their steps may take minutes


class GenerationGroup:
    """A generation's process group, seen from one rank. ``store`` is the generation's own, under its prefix."""

    def __init__(self, spec: GenerationSpec, member: Member, store: Store, device: torch.device) -> None:
        self.spec, self.member = spec, member
        self.store, self.device = store, device
        self._group: Any = dist.distributed_c10d._get_default_group()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """A one-dimensional mesh over all ranks, made on first use. Users build other shapes from it."""
        return init_device_mesh(self.device.type, (self.spec.world_size,))

    def count_collectives(self) -> int:
        """Return the number of collectives this rank has begun in the group; cheap, and safe from any thread."""
        return int(self._group._get_sequence_number_for_group())


def device_for(backend: GlooBackend, local_rank: int) -> torch.device:
    """Return the device of a local rank: its CUDA device under NCCL, otherwise the CPU."""
    return torch.device("cuda", local_rank) if "nccl" in backend.name else torch.device("cpu")


class Rendezvous:
    """Joins and leaves generations; ``cut_store`` and the backend's ``abort`` end a join from the signal thread."""

    def __init__(self, backend: GlooBackend, settings: HookSettings) -> None:
        patch_mesh_equality()
        self._backend, self._settings = backend, settings
        self._address: tuple[str, int] | None = None
        self._connection: TCPStore | None = None
        self._cut = False
        self._retired: list[object] = []
        self._releasing: list[threading.Thread] = []
        self.group: GenerationGroup | None = None

    def join(self, spec: GenerationSpec, member: Member, is_over: Callable[[], bool]) -> None:
        """Form ``group``, the process group of ``spec``. Raises Regroup if ``is_over``, RuntimeError on a time-out."""
        try:
            self.group = self._join(spec, member, is_over)
        except (Regroup, RuntimeError) as error:
            self._connection = None
            self.leave(must_abort=True)
            if is_over():
                raise Regroup from error
            raise

    def _join(self, spec: GenerationSpec, member: Member, is_over: Callable[[], bool]) -> GenerationGroup:
        base = self._connect(spec.store, is_over)
        if is_over():  # cutting the connection from now on breaks the calls below
            raise Regroup
        store = PrefixStore(f"g{spec.number}", base)
        device = device_for(self._backend, member.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._initialize(store, member.rank, spec)
        group = GenerationGroup(spec, member, store, device)
        self._first_all_reduce(device, spec.world_size, is_over)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=self._settings.collective_timeout_s))
        return group

    def _connect(self, address: str, is_over: Callable[[], bool]) -> TCPStore:
        """Return the connection to the store; reuse the present one if it is intact and has the same address."""
        wanted = split_address(address)
        known = self._connection
        if known is not None and wanted == self._address and not self._cut and _is_connected(known):
            return known
        self._connection = None
        self._address, self._cut = wanted, False
        if wanted[0] in ("127.0.0.1", "localhost", "::1"):  # gloo would listen on the host's address
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._wait_reachable(wanted, is_over)
        timeout = timedelta(seconds=self._settings.join_timeout_s)
        self._connection = TCPStore(*wanted, is_master=False, timeout=timeout, wait_for_workers=False)
        return self._connection

    def _wait_reachable(self, address: tuple[str, int], is_over: Callable[[], bool]) -> None:
        """Wait until something listens there: TCPStore's own attempts cannot be interrupted, and log loudly."""
        deadline = perf_counter() + self._settings.join_timeout_s
        while True:
            try:
                socket.create_connection(address, CONNECT_TIMEOUT_S).close()
                return
            except OSError as error:
                if is_over():
                    raise Regroup from error
                if perf_counter() > deadline:
                    raise RuntimeError(f"no rendezvous store at {address[0]}:{address[1]}: {error}") from error
            sleep(CONNECT_RETRY_S)

    def _initialize(self, store: Store, rank: int, spec: GenerationSpec) -> None:
        hook = sys.excepthook
        # A failed initialization has counted its group all the same, and the count names the next group. Ranks with
        # different numbers of failures would look for one another under different keys.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            self._backend.name,
            store=store,
            rank=rank,
            world_size=spec.world_size,
            timeout=timedelta(seconds=self._settings.join_timeout_s if spec.after_step is None else BOUNDARY_JOIN_S),
        )
        sys.excepthook = hook  # torch wraps it each time, which would nest over generations

    def _first_all_reduce(self, device: torch.device, world_size: int, is_over: Callable[[], bool]) -> None:
        """Run a first all-reduce, to prove every connection; on a GPU first over gloo, which can be aborted."""
        self._backend.connect(device)
        present = torch.ones(1)
        wait_or_regroup(dist.all_reduce(present, async_op=True), is_over)
        if device.type == "cuda":
            present = torch.ones(1, device=device)
            poll_or_regroup(dist.all_reduce(present, async_op=True), is_over)
        if int(present.item()) != world_size:
            raise RuntimeError(f"{int(present.item())} of {world_size} ranks took part in the first all-reduce")

    def leave(self, *, must_abort: bool) -> None:
        """Destroy all process groups, after an abort if ``must_abort``; ``release`` then frees what they hold."""
        if self.group is not None:
            self._retired.append(self.group)
        self.group = None
        if not dist.is_initialized():
            return
        if must_abort:
            self._backend.abort()
            self._backend.wait_aborted(ABORT_WAIT_S)
        self._retired += dist.distributed_c10d._world.pg_map
        dist.destroy_process_group()

    def release(self) -> None:
        """Drop the last references to groups that were left, in a thread: destructors wait, at worst for a time-out."""
        retired, self._retired = self._retired, []
        self._releasing = [thread for thread in self._releasing if thread.is_alive()]
        if retired:
            thread = threading.Thread(target=retired.clear, name="everstep-release", daemon=True)
            thread.start()
            self._releasing.append(thread)

    def close(self) -> None:
        """Clean up before the process ends: a destructor that returns while the interpreter ends would abort it."""
        self.leave(must_abort=False)
        self._connection = None
        self.release()
        deadline = perf_counter() + RELEASE_TIMEOUT_S
        for thread in self._releasing:
            thread.join(max(0.0, deadline - perf_counter()))

    def cut_store(self) -> None:
        """Break the connection to the store from another thread, so that no thread waits on it any longer."""
        if self._address is None:
            return
        port = self._address[1]
        self._cut = True
        to_store = partial(abort.connections_to_port, port)
        abort.close_sockets(abort.shut_connections(to_store(), to_store))


def _is_connected(connection: TCPStore) -> bool:
    """Return whether the store is still the one connected to: a new host may listen at the address of an ended one."""
    try:
        connection.check(["answers"])
    except RuntimeError:
        return False
    return True
