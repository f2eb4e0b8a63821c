"""The supervisor's side of sensing: starts the sensor process, notices when it hangs, and judges what it says."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.clock import Backoff, Clock
from everstep.errors import UNREADABLE, ConfigurationError, MalformedMessage
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep_agent.drivers import sysfs
from everstep_agent.drivers.kmsg import KernelLog, LogPosition
from everstep_agent.findings.assessment import Assessor, Instant, Memory
from everstep_agent.findings.rules import load_policy
from everstep_agent.sensors.samples import SensorState
from everstep_agent.sensors.sensor_messages import (
    DOING_BYTES,
    MAX_POLL_BYTES,
    Begin,
    Picture,
    Poll,
    wire_gpu,
    wire_host,
)
from everstep_agent.virtual.scenario import Machine, Scenario, load_scenario

# ---- settings
# How the sensors of a node are set.


class SensorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Every knob of the sensors.

    node: the node's name; goes into log lines and traces.
    interval_s: seconds between polls. 1 s sees a thermal excursion before the driver acts on it, and 8 GPUs cost a
        few milliseconds.
    deadline_s: how late a poll may be before the sensor process counts as hung and is killed. NVML calls take
        microseconds to a few milliseconds, but a busy driver holds its lock for up to seconds: 5 s.
    start_deadline_s: the same for the first poll. Without persistence mode the driver initialises every GPU when
        NVML opens, 1 to 3 s each: 60 s.
    slow_every: slow-moving values (ECC, links, retired pages) of each GPU are read at every n-th poll.
    expected_gpus: how many GPUs this node should have. None: as many as the PCI bus shows.
    virtual: scenario file, "default" or "default:N" for a virtual machine; empty for the real one.
    virtual_control: control file of the virtual machine; may appear later.
    kernel_log: /dev/kmsg, or a file or named pipe; empty for none.
    log_poll_s: how often a plain file is looked at (a device or pipe wakes us itself). 50 ms is below what a
        person or a drain can notice, and costs 20 calls of fstat a second.
    state_path: where findings that outlive the agent (XIDs until a reset or a reboot) are kept; empty for nowhere.
    site_policy: TOML files whose rules replace ours of the same id.
    sysfs_root, proc_root: for tests.
    disk_paths: file systems whose free space matters.
    restart_floor_s, restart_ceiling_s: back-off between restarts of the sensor process.
    """

    node: str = ""
    interval_s: float = 1.0
    deadline_s: float = 5.0
    start_deadline_s: float = 60.0
    slow_every: int = 10
    expected_gpus: int | None = None
    virtual: str = ""
    virtual_control: str = ""
    kernel_log: str = "/dev/kmsg"
    log_poll_s: float = 0.05
    state_path: str = ""
    site_policy: tuple[str, ...] = ()
    sysfs_root: str = "/sys"
    proc_root: str = "/proc"
    disk_paths: tuple[str, ...] = ("/",)
    restart_floor_s: float = 0.2
    restart_ceiling_s: float = 30.0

    def validate(self) -> None:
        """Raises ConfigurationError for settings that contradict each other."""
        if self.interval_s <= 0 or self.deadline_s <= 0:
            raise ConfigurationError("interval_s and deadline_s must be above zero")
        if self.start_deadline_s < self.deadline_s:
            raise ConfigurationError(
                f"start_deadline_s ({self.start_deadline_s}) is below deadline_s ({self.deadline_s}): the first poll "
                "also initialises the driver; raise start_deadline_s"
            )
        if self.slow_every < 1:
            raise ConfigurationError(f"slow_every must be at least 1, not {self.slow_every}")
        if self.restart_ceiling_s < self.restart_floor_s:
            raise ConfigurationError("restart_ceiling_s is below restart_floor_s")
        if self.virtual_control and not self.virtual:
            raise ConfigurationError("a control file drives a virtual machine: say --virtual default, or a scenario")


# ---- keep
# What the sensors keep on disk between two lives of the agent.

logger = logging.getLogger(__name__)

MAX_BYTES = 4 << 20


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The assessor's memory, and how far the kernel's log had been read when it was written."""

    memory: Memory = Memory()
    log: LogPosition | None = None


def load_kept(path: str) -> Kept:
    """What is kept at ``path``; nothing where there is no file, or one that cannot be used (that is logged)."""
    if not path:
        return Kept()
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(MAX_BYTES), type=Kept)
    except FileNotFoundError:
        return Kept()
    except (OSError, *UNREADABLE) as error:
        logger.warning("sensor state %s cannot be used, starting without: %s", path, error)
        return Kept()


def store_kept(path: str, kept: Kept) -> None:
    """Replaces the file at once or not at all; a failure is logged, since sensing goes on without it."""
    if not path:
        return
    draft = Path(path).with_name(f".{Path(path).name}.{os.getpid()}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(kept))
        draft.rename(path)
    except OSError as error:
        logger.warning("sensor state %s cannot be written: %s", path, error)


# ---- spawn
# One life of the sensor process, held from outside: started, listened to, explained, killed.

KILL_WAIT_S = 1.0
"""How long a killed process may take to vanish before it is left to the kernel: it sits in a driver call."""

REAP_CHECK_S = 0.01
READ_BYTES = 1 << 16


class SensorChild:
    """A running sensor process. Start it from the main thread: it follows that thread's end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        page = os.memfd_create("everstep-sensors", os.MFD_CLOEXEC)
        try:
            os.ftruncate(page, DOING_BYTES)
            self._page = mmap.mmap(page, DOING_BYTES, prot=mmap.PROT_READ)
            arguments = [str(theirs.fileno()), str(page), str(os.getpid())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "everstep_agent.sensors.sampler", *arguments],
                pass_fds=(theirs.fileno(), page),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "MALLOC_ARENA_MAX": "1"},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(page)
        ours.setblocking(False)
        self._channel = ours
        self._decoder: FrameDecoder[Poll] = FrameDecoder(Poll, MAX_POLL_BYTES)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def doing(self) -> str:
        """What it said last that it would touch."""
        return bytes(self._page[:DOING_BYTES]).rstrip(b"\0").decode("utf-8", "replace") or "start"

    async def begin(self, begin: Begin) -> None:
        """Tells it how to sense. Raises OSError where it is gone."""
        await asyncio.get_running_loop().sock_sendall(self._channel, encode_frame(begin))

    async def receive(self, deadline: float) -> list[Poll] | None:
        """The next messages, or None at the end of the process.

        Raises TimeoutError when none came until ``deadline`` (the event loop's time), and MalformedMessage.
        """
        try:
            async with asyncio.timeout_at(deadline):
                data = await asyncio.get_running_loop().sock_recv(self._channel, READ_BYTES)
        except TimeoutError:
            # We may be the ones who were late: what has arrived meanwhile speaks for the process.
            data = self._arrived()
        return self._decoder.feed(data) if data else None

    def _arrived(self) -> bytes:
        try:
            return self._channel.recv(READ_BYTES)
        except BlockingIOError:
            raise TimeoutError from None

    @property
    def gone(self) -> bool:
        return self._process.poll() is not None

    async def end(self) -> str:
        """Kills it, waits a moment for it to vanish, and says how it ended. May be called again."""
        self._channel.close()
        killed = not self.gone
        if killed:
            self._process.kill()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + KILL_WAIT_S
        while not self.gone and loop.time() < deadline:
            await asyncio.sleep(REAP_CHECK_S)
        self._page.close()
        if not self.gone:
            return f"pid {self.pid} does not die: it is held in the kernel"
        return "killed" if killed else f"exit status {self._process.returncode}"


BACKLOG_S = 900.0
"""Without a memory of its own, the agent takes no line of the kernel's log that is older: what an older one told of has
been cured, or shows in NVML. A fresh installation must not evict a node for the XID of last month."""

STORM_PAUSE_S = 0.01
"""Between two portions of a kernel log that does not end, the event loop's other work has its turn."""


class SensorProcess:
    """Senses a node: ``on_picture`` gets all that is known, at every poll and at once when a finding comes or goes.

    Args:
        settings: what and how; see there.
        clock: for the times of findings and for clearing rules.
        on_picture: called in the event loop; must not block.

    Raises ConfigurationError for settings, a policy or a scenario that cannot be used.
    """

    def __init__(self, settings: SensorSettings, clock: Clock, on_picture: Callable[[Picture], None]) -> None:
        settings.validate()
        self._settings = settings
        self._clock = clock
        self._on_picture = on_picture
        self._scenario = load_scenario(settings.virtual, settings.node) if settings.virtual else None
        kept = load_kept(settings.state_path)
        boot_id = _boot_id(settings, self._scenario)
        self._assessor = Assessor(
            load_policy(settings.site_policy), settings.node, settings.expected_gpus, kept.memory, self._now()
        )
        self._assessor.boot(boot_id)
        self._log = _kernel_log(settings, kept, boot_id)
        self._log_failed = False
        self._child: SensorChild | None = None
        self._ending: list[SensorChild] = []
        self._poll = Poll(full=True, boot_id=boot_id)
        self._polled_at = 0.0
        self._hangs = self._ends = self._restarts = 0
        self._skew_s: float | None = None

    @property
    def pid(self) -> int | None:
        """The running sensor process."""
        return None if self._child is None else self._child.pid

    @property
    def picture(self) -> Picture:
        """All that is known now."""
        poll = self._poll
        return Picture(
            at=self._clock.wall(),
            boot_id=poll.boot_id,
            driver_version=poll.driver_version,
            gpu_ids=tuple(wire_gpu(gpu) for gpu in poll.known),
            host_id=wire_host(poll.host_id),
            gpus=poll.gpus,
            ports=poll.ports,
            paths=poll.paths,
            host=poll.host,
            findings=self._assessor.findings,
            xid_counts=self._assessor.xids.totals,
            poll_s=poll.poll_s,
            polled_at=self._polled_at,
            restarts=self._restarts,
        )

    def note_clock_skew(self, seconds: float) -> None:
        """This node's clock minus the controller's, as the heartbeat sees it."""
        self._skew_s = seconds

    async def run(self) -> None:
        """Senses until cancelled. Ends the sensor process on the way out."""
        if self._assessor.findings:
            self._on_picture(self.picture)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._sense())
                if self._log is not None:
                    tasks.create_task(self._follow(self._log))
        finally:
            for child in self._ending:
                await child.end()
            if self._log is not None:
                self._log.close()
            self._keep()

    # --- the sensor process ---

    async def _sense(self) -> None:
        backoff = Backoff(floor_s=self._settings.restart_floor_s, ceiling_s=self._settings.restart_ceiling_s)
        while True:
            await self._one_life()
            self._restarts += 1
            failures = self._hangs + self._ends
            # No fleet shares this back-off, so it needs no jitter: the whole delay, every time.
            await asyncio.sleep(backoff.delay_s(max(0, failures - 1), 1.0))

    async def _one_life(self) -> None:
        child = self._child = SensorChild()
        self._ending = [child, *(other for other in self._ending if not other.gone)]
        reason, hung = "", False
        try:
            await child.begin(self._begin())
            await self._listen(child)
        except TimeoutError:
            hung = True
            self._hung(child)
        except (OSError, MalformedMessage) as error:
            reason = str(error)
        finally:
            self._child = None
            how = await child.end()
        if not hung:
            self._ended(reason or how)

    async def _listen(self, child: SensorChild) -> None:
        """Takes what the child says until it ends. Raises TimeoutError when a poll is overdue."""
        loop = asyncio.get_running_loop()
        patience_s = self._settings.interval_s + self._settings.deadline_s
        deadline = loop.time() + self._settings.start_deadline_s
        while (messages := await child.receive(deadline)) is not None:
            for message in messages:
                self._take(message)
                if message.full:
                    deadline = loop.time() + patience_s

    def _begin(self) -> Begin:
        settings = self._settings
        return Begin(
            interval_s=settings.interval_s,
            slow_every=settings.slow_every,
            sysfs_root=settings.sysfs_root,
            proc_root=settings.proc_root,
            disk_paths=settings.disk_paths,
            scenario=self._scenario,
            control=settings.virtual_control,
            resumed=self._restarts > 0,
        )

    def _take(self, message: Poll) -> None:
        now = self._now()
        if message.full:
            self._hangs = self._ends = 0
            self._poll, self._polled_at = message, now.wall
            changed = self._assessor.poll(message, self._skew_s, now)
        else:
            changed = self._assessor.kernel_lines(message.lines, now)
            changed |= self._assessor.xid_events(message.xids, now)
        if changed or message.full:
            self._publish(changed)

    def _hung(self, child: SensorChild) -> None:
        self._hangs += 1
        detail = f"of {self._settings.deadline_s:g} s at: {child.doing}"
        logger.warning("sensor process %d is hung %s", child.pid, detail, extra={"node": self._settings.node})
        self._publish(self._assessor.sensor(SensorState(hangs=self._hangs, detail=detail), self._now()))

    def _ended(self, reason: str) -> None:
        self._ends += 1
        logger.warning("sensor process ended: %s", reason, extra={"node": self._settings.node})
        self._publish(self._assessor.sensor(SensorState(crashes=self._ends, detail=reason), self._now()))

    # --- the kernel's log ---

    async def _follow(self, log: KernelLog) -> None:
        while True:
            if self._drain(log):
                await asyncio.sleep(STORM_PAUSE_S)
            elif log.wakes is None:
                await _grown(log, self._settings.log_poll_s)
            else:
                await _readable(log.wakes)

    def _drain(self, log: KernelLog) -> bool:
        """Takes one portion, a few milliseconds' work; True where there may be more."""
        lines = log.read()
        changed = self._assessor.kernel_lines(lines, self._now())
        if bool(log.error) != self._log_failed:
            self._log_failed = bool(log.error)
            state = SensorState(log_failed=int(self._log_failed), detail=log.error)
            changed |= self._assessor.sensor(state, self._now())
        if changed:
            self._publish(changed)
        return bool(lines)

    # --- what goes out ---

    def _publish(self, changed: bool) -> None:
        self._on_picture(self.picture)
        if changed:
            self._keep()

    def _keep(self) -> None:
        position = None if self._log is None else self._log.position
        store_kept(self._settings.state_path, Kept(memory=self._assessor.memory(), log=position))

    def _now(self) -> Instant:
        return Instant(self._clock.wall(), self._clock.monotonic())


def _boot_id(settings: SensorSettings, scenario: Scenario | None) -> str:
    """The machine's boot as it can be told without touching a driver; empty where it cannot."""
    if scenario is not None:
        machine = Machine(scenario, settings.virtual_control, resumed=True)
        machine.refresh()
        return machine.boot_id
    try:
        return sysfs.boot_id(Path(settings.proc_root))
    except OSError:
        return ""


def _kernel_log(settings: SensorSettings, kept: Kept, boot_id: str) -> KernelLog | None:
    if not settings.kernel_log:
        return None
    position = kept.log
    if position is not None and kept.memory.boot_id == boot_id:
        return KernelLog(settings.kernel_log, position)
    if position is not None:
        # The kernel numbers its lines anew at every boot; a file goes on where it was.
        position = LogPosition(inode=position.inode, offset=position.offset)
    try:
        not_before_s = sysfs.uptime_s(Path(settings.proc_root)) - BACKLOG_S
    except (OSError, ValueError, IndexError):
        not_before_s = 0.0
    return KernelLog(settings.kernel_log, position, not_before_s)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)


async def _grown(log: KernelLog, look_every_s: float) -> None:
    """Looks by timer alone, which costs half of what a sleeping task does at twenty looks a second."""
    loop = asyncio.get_running_loop()
    grown: asyncio.Future[None] = loop.create_future()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        if grown.done():
            return
        if log.has_news():
            grown.set_result(None)
        else:
            timer = loop.call_later(look_every_s, look)

    timer = loop.call_later(look_every_s, look)
    try:
        await grown
    finally:
        grown.cancel()
        timer.cancel()
