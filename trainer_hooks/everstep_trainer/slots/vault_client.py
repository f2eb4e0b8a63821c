"""Connect a rank to its node's vault: requests and answers over one Unix socket, with one reader thread.

Every request is idempotent. One that was unanswered when the vault went away is sent again to the next vault on the
same path. Errors from the vault come back as the class of ``everstep.errors`` with that code.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from everstep import errors
from everstep.clock import Backoff, Clock
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK, SegmentView
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1 import local
from everstep.wire.v1.training import PeerConnectionLost

# ---- NUMA node of a rank's memory: its GPU's, else that of the processors it may run on

SYSFS = Path("/sys")


def numa_node(sysfs: Path = SYSFS) -> int | None:
    """Return the NUMA node of the device, or of the processors before CUDA is used; None if there is no single one."""
    nodes = _nodes(sysfs)
    if len(nodes) < 2:
        return None
    device = _gpu_address()
    if device is not None:
        try:
            node = int((sysfs / "bus/pci/devices" / device / "numa_node").read_text())
        except (OSError, ValueError):
            return None
        return node if node >= 0 else None  # -1: the firmware does not say
    allowed = os.sched_getaffinity(0)
    return next((node for node, processors in nodes.items() if allowed <= processors), None)


def _nodes(sysfs: Path) -> dict[int, set[int]]:
    """Return the processors of each node that has some."""
    found = {}
    for folder in sorted((sysfs / "devices/system/node").glob("node[0-9]*")):
        if processors := _listed((folder / "cpulist").read_text()):
            found[int(folder.name.removeprefix("node"))] = processors
    return found


def _listed(text: str) -> set[int]:
    """Parse the kernel's notation of a set of numbers: ``0-3,8``."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _gpu_address() -> str | None:
    """Return the PCI address of the GPU that this process uses, as sysfs writes it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"


# ---- segment file mapped by a rank


class MappedSegment:
    """A segment file mapped writable into this process. The mapping lives as long as this object or a view of it."""

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "r+b") as file:
            status = os.fstat(file.fileno())
            self._map = mmap.mmap(file.fileno(), 0)
        self.identity = (status.st_dev, status.st_ino)
        self.buffer = memoryview(self._map)
        self.view = SegmentView(self.buffer)
        self.is_page_locked = False

    def is_current(self) -> bool:
        """Return whether the path still names the mapped file; a restarted vault may have made another."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self.identity


log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 16
MAX_DESCRIPTORS = 16  # most descriptors in one call; the kernel ends a read after the first frame with a descriptor
TICK_S = 0.25  # interval at which the reader looks for requests whose deadline passed
OPEN_TIMEOUT_S = 300.0
"""Time-out for making a segment: the first touch of its pages runs at 0.6 GB/s for all ranks of a node together."""
COPY_TIMEOUT_S = 300.0  # of the copies to other nodes, which wait for those of other ranks; the vault ends dead ones
DECODE_TIMEOUT_S = 300.0  # time-out for rebuilding a slot from parity, which reads all other slots of its group
STARTUP_CHECK_WAIT_S = 20.0
"""Time for vaults to hash the slots they found at start, newest versions first; ranks wait a minute for one another."""
RECONNECT = Backoff(floor_s=0.01, ceiling_s=0.5)


class VaultConnection(msgspec.Struct, frozen=True):
    """An authenticated connection to another node's vault, and how long to wait on it."""

    sock: socket.socket
    answer_timeout_s: float
    io_timeout_s: float


class _AwaitedReply(msgspec.Struct):
    frame: bytes
    deadline: float
    future: Future[Any]


class VaultClient:
    """Client of the vault at ``socket_path``, which reconnects; Unavailable if no answer comes within ``timeout_s``."""

    def __init__(self, socket_path: str, *, timeout_s: float = 10.0, clock: Clock = SYSTEM_CLOCK) -> None:
        self._path = socket_path
        self._timeout_s, self._clock = timeout_s, clock
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pending: dict[int, _AwaitedReply] = {}
        self._socket: socket.socket | None = None
        self._segments: dict[str, MappedSegment] = {}
        self._closed = threading.Event()
        self._wanted = threading.Event()
        self._reader = threading.Thread(target=self._run, name="everstep-vault", daemon=True)
        self._reader.start()

    def open_segment(
        self,
        job: str,
        local_rank: int,
        slot_bytes: int,
        slots: int = SLOTS_PER_RANK,
        keep: tuple[Version, ...] | None = None,
    ) -> MappedSegment:
        """Return the rank's segment, mapped writable, with slots of at least ``slot_bytes``; with ``keep`` exactly
        ``slots`` of them, and if it had more, these versions are the first to stay. Raises OutOfSlotMemory."""
        node = numa_node()
        wanted = local.OpenSegment(
            request=0, job=job, local_rank=local_rank, slot_bytes=slot_bytes, slots=slots, numa_node=node, keep=keep
        )
        answer: local.SegmentOpened = self._request(wanted, OPEN_TIMEOUT_S).result()
        return self.map_segment(answer.path)

    def check_room(self, wanted: local.CheckCapacity) -> None:
        """Check that the node has all of these segments or could make them. Raises OutOfSlotMemory, or Unavailable."""
        self._request(wanted).result()

    def map_segment(self, path: str) -> MappedSegment:
        """Return the rank's segment at ``path`` in its mapping, made if needed. Raises OSError, DigestMismatch."""
        known = self._segments.get(path)
        if known is None or not known.is_current():
            known = self._segments[path] = MappedSegment(path)
        return known

    def report_sealed(self, sealed: local.SlotSealed) -> Future[local.Replicated]:
        """Report that a slot is sealed; the future returns the nodes that have a copy. Returns at once."""
        return self._request(sealed, COPY_TIMEOUT_S)

    def inventory(self, job: str, nodes: tuple[str, ...] = (), *, timeout_s: float = 1.0) -> tuple[local.SlotInfo, ...]:
        """Return the job's sealed slots here and on ``nodes``; STARTUP_CHECK_WAIT_S more for vaults still hashing."""
        deadline = self._clock.monotonic() + STARTUP_CHECK_WAIT_S
        while True:
            wanted = local.Inventory(request=0, job=job, nodes=nodes, timeout_s=timeout_s)
            answer: local.InventoryAnswer = self._request(wanted).result()
            if not answer.unchecked:
                return answer.slots
            if self._clock.monotonic() > deadline:
                log.warning("%d slots are ignored: no vault has hashed them yet", answer.unchecked, extra={"job": job})
                return answer.slots

    def fetch(self, wanted: local.Fetch) -> Future[local.Fetched]:
        """Copy a slot's manifest, or ranges of a slot rebuilt from parity, into a file. Returns at once."""
        return self._request(wanted, None if wanted.parity_group is None else DECODE_TIMEOUT_S)

    def connect(self, *, job: str, node: str) -> Future[VaultConnection]:
        """Open an authenticated connection to ``node``'s vault, owned by the caller. Returns at once."""
        return self._request(local.OpenPeerConnection(request=0, job=job, node=node))

    def report_broken_connection(self, *, job: str, node: str, reason: str) -> None:
        """Report to the vault that such a connection broke without the caller's doing. Returns at once."""
        self._request(local.PeerConnectionBroken(request=0, job=job, node=node, reason=reason[:1000]))

    def close(self) -> None:
        """End the connection and its thread; unanswered requests raise Unavailable. Mappings stay valid."""
        self._closed.set()
        self._wanted.set()
        with self._lock:
            self._drop_connection()
        self._reader.join(timeout=2.0)
        self._fail_pending(lambda _: True, "the connection to the vault was closed")

    def _request(self, message: local.ToVault, timeout_s: float | None = None) -> Future[Any]:
        """Send a request under the next number (callers pass 0). The future outlives the timeout by at most a tick."""
        number = next(self._numbers)
        frame = encode_frame(msgspec.structs.replace(message, request=number))
        pending = _AwaitedReply(frame, self._clock.monotonic() + (timeout_s or self._timeout_s), Future())
        with self._lock:
            if self._closed.is_set():
                raise errors.Unavailable("the connection to the vault was closed")
            self._pending[number] = pending
            if self._socket is not None:
                self._send(pending.frame)
        self._wanted.set()
        return pending.future

    def _send(self, frame: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(frame)
        except OSError:
            self._drop_connection()  # the request stays pending and is sent again

    def _drop_connection(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # already gone
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket = None

    # --- the reader thread

    def _run(self) -> None:
        attempt = 0
        while not self._closed.is_set():
            self._wanted.wait()
            if self._closed.is_set():
                return
            connection = self._connect()
            if connection is None:
                self._expire()
                self._closed.wait(RECONNECT.delay_s(attempt, 1.0))
                attempt += 1
                continue
            attempt = 0
            with connection:
                self._serve(connection)

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(TICK_S)
            connection.connect(self._path)
        except OSError:
            connection.close()
            return None
        with self._lock:
            self._socket = connection
            for pending in list(self._pending.values()):
                if self._socket is not None:
                    self._send(pending.frame)
        return connection

    def _serve(self, connection: socket.socket) -> None:
        decoder: FrameDecoder[local.FromVault] = FrameDecoder(local.FromVault, local.MAX_FRAME_BYTES)
        received_sockets: deque[socket.socket] = deque()
        try:
            while not self._closed.is_set() and self._receive(connection, decoder, received_sockets):
                pass
        finally:
            for sock in received_sockets:
                sock.close()

    def _receive(
        self, connection: socket.socket, decoder: FrameDecoder[local.FromVault], received_sockets: deque[socket.socket]
    ) -> bool:
        """Receive what is there, and return False at the end. Descriptors arrive with their frame or before it."""
        data, flags = b"", socket.MSG_CMSG_CLOEXEC
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, RECEIVE_BYTES, MAX_DESCRIPTORS, flags)
            received_sockets.extend(socket.socket(fileno=descriptor) for descriptor in descriptors)
        except TimeoutError:
            self._expire()
            return True
        except OSError:
            pass
        try:
            for answer in decoder.feed(data):
                self._take(answer, received_sockets)
        except errors.MalformedMessage as error:
            log.warning("the vault sent an unreadable message; reconnecting: %s", error)
            data = b""
        if not data:
            with self._lock:
                if self._socket is connection:
                    self._drop_connection()
        return bool(data)

    def _take(self, answer: local.FromVault, received_sockets: deque[socket.socket]) -> None:
        if isinstance(answer, local.VaultFinding | PeerConnectionLost):
            return  # for supervisors
        result: local.FromVault | VaultConnection = answer
        if isinstance(answer, local.PeerConnectionOpened):
            if not received_sockets:
                raise errors.MalformedMessage("the vault announced a connection but sent none")
            result = VaultConnection(received_sockets.popleft(), answer.answer_timeout_s, answer.io_timeout_s)
        with self._lock:
            pending = self._pending.pop(answer.request, None)
        if pending is None:  # answered after its deadline, or twice after a reconnect
            if isinstance(result, VaultConnection):
                result.sock.close()
        elif isinstance(answer, local.RequestFailed):
            kind = errors.BY_CODE.get(answer.code, errors.EverstepError)
            pending.future.set_exception(kind(answer.message))
        else:
            pending.future.set_result(result)

    def _expire(self) -> None:
        now = self._clock.monotonic()
        self._fail_pending(lambda p: p.deadline <= now, f"the vault at {self._path} did not answer in time")

    def _fail_pending(self, chosen: Callable[[_AwaitedReply], bool], message: str) -> None:
        with self._lock:
            late = [number for number, pending in self._pending.items() if chosen(pending)]
            dropped = [self._pending.pop(number) for number in late]
        for pending in dropped:
            pending.future.set_exception(errors.Unavailable(message))
