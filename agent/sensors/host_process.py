"""The supervisor's side of sensing: starts the sensor process, notices when it hangs, and judges what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from agent.assess import Assessor, Instant
from agent.drivers import sysfs
from agent.drivers.kmsg import KernelLog, LogPosition
from agent.policy.rules import load_policy
from agent.sensors.frames import Begin, Poll
from agent.sensors.keep import Kept, load_kept, store_kept
from agent.sensors.picture import Picture, wire_gpu, wire_host
from agent.sensors.samples import SensorState
from agent.sensors.settings import SensorSettings
from agent.sensors.spawn import SensorChild
from agent.virtual.load import load_scenario
from agent.virtual.machine import Machine
from agent.virtual.scenario import Scenario
from everstep.backoff import Backoff
from everstep.clock import Clock
from everstep.errors import MalformedMessage

logger = logging.getLogger(__name__)

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
