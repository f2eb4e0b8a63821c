"""The supervisor's side of sensing: start the sensor process, notice hangs, and judge its samples."""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.clock import Backoff, Clock
from everstep.errors import DECODE_ERRORS, MalformedMessage
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep_agent.drivers import sysfs
from everstep_agent.drivers.kmsg import KernelLog, LogPosition, is_null_device
from everstep_agent.drivers.samples import SensorState
from everstep_agent.findings.assessment import AssessorState, FindingAssessor, Instant
from everstep_agent.lifecycle import end_child, start_child, wait_readable, write_atomically
from everstep_agent.node_profile.store import ProfileStore
from everstep_agent.policy.reload import POLICY_CHECK_S, PolicyWatch
from everstep_agent.sensors.sensor_messages import (
    ACTIVITY_BYTES,
    MAX_POLL_BYTES,
    PollResult,
    SensorConfig,
    SensorReport,
)
from everstep_agent.virtual.machine_tree import remove_tree
from everstep_agent.virtual.scenario import Scenario, VirtualMachine, load_scenario

# Settings


class SensorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the sensors."""

    node: str = ""  # the node's name, for log lines and traces
    interval_s: float = 1.0  # sees a thermal excursion before the driver acts; 8 GPUs cost a few milliseconds a poll
    hang_timeout_s: float = 5.0  # a later poll is a hang, and kills; a busy driver holds its lock for up to seconds
    start_timeout_s: float = 60.0  # for the first poll; a driver without persistence mode takes 1 to 3 s per GPU
    slow_every: int = 10  # slow-moving values (ECC, links, retired pages) of each GPU are read at every n-th poll
    expected_gpus: int | None = None  # GPUs this node should have; None: as many as the PCI bus shows
    virtual: str = ""  # scenario file, "default" or "default:N" for a virtual machine; empty for the real one
    virtual_control: str = ""  # control file of the virtual machine; may appear later
    virtual_folder: str = ""  # folder for the virtual machine's /sys and /proc files, whose content is replaced
    kernel_log: str = "/dev/kmsg"  # /dev/kmsg, or a file or named pipe; empty for none
    kernel_log_poll_s: float = 0.05  # between checks of a plain file; a device or pipe wakes the agent itself
    state_path: str = ""  # file for findings that outlive the agent (XIDs until a reset or a reboot); empty for none
    profile_folder: str = ""  # folder of the node's profile; empty for none
    reads_gpm: bool = False  # how busy the parts of a GPU are
    pause_file: str = ""  # while this file exists, NVML stays closed, for a reset or a new driver; empty for none
    site_policy: tuple[str, ...] = ()  # TOML files laid over the built-in rules; read again when they change
    policy_check_s: float = POLICY_CHECK_S  # between two looks at these files
    sysfs_root: str = "/sys"
    proc_root: str = "/proc"
    disk_paths: tuple[str, ...] = ("/",)  # file systems whose free space is watched
    vault_folder: str = ""  # where the vault keeps its slots, whose size is expected; empty for no vault
    watch_units: tuple[str, ...] = ()  # units of systemd that are watched
    restart_floor_s: float = 0.2  # limits of the back-off between restarts of the sensor process
    restart_ceiling_s: float = 30.0


# State kept on disk between two runs of the agent.

logger = logging.getLogger(__name__)

MAX_STATE_BYTES = 4 << 20


class SavedSensorState(msgspec.Struct, frozen=True, kw_only=True):
    """The assessor's state, the kernel log's read position when it was written, and the policy files in force."""

    assessor_state: AssessorState = AssessorState()
    log_position: LogPosition | None = None
    policy_texts: dict[str, str] = {}


def load_sensor_state(path: str) -> SavedSensorState:
    """Return the state stored at ``path``; empty if there is no file, or an unusable one (which is logged)."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(MAX_STATE_BYTES), type=SavedSensorState)
    except FileNotFoundError:
        pass
    except (OSError, *DECODE_ERRORS) as error:
        logger.warning("sensor state %s cannot be read, starting without it: %s", path, error)
    return SavedSensorState()


def save_sensor_state(path: str, state: SavedSensorState) -> None:
    """Replace the file atomically; a failure is logged, since sensing continues without it."""
    if not path:
        return
    try:
        write_atomically(Path(path), state)
    except OSError as error:
        logger.warning("sensor state %s cannot be written: %s", path, error)


# One run of the sensor process, from outside: start, receive, explain, kill.

KILL_WAIT_S = 1.0
"""Seconds to wait for a killed process; after that it is left to the kernel, because it sits in a driver call."""

READ_BYTES = 1 << 16


class SensorChild:
    """A running sensor process. Start it from the main thread: it ends with that thread."""

    def __init__(self) -> None:
        page = os.memfd_create("everstep-sensors", os.MFD_CLOEXEC)
        try:
            os.ftruncate(page, ACTIVITY_BYTES)
            self._activity_page = mmap.mmap(page, ACTIVITY_BYTES, prot=mmap.PROT_READ)
            self._process, self._channel = start_child("everstep_agent.sensors.sampler", page, MALLOC_ARENA_MAX="1")
        finally:
            os.close(page)
        self._decoder: FrameDecoder[PollResult] = FrameDecoder(PollResult, MAX_POLL_BYTES)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def current_activity(self) -> str:
        """The process's last announced activity."""
        return bytes(self._activity_page[:ACTIVITY_BYTES]).rstrip(b"\0").decode("utf-8", "replace") or "start"

    async def configure(self, config: SensorConfig) -> None:
        """Send the configuration. Raises OSError if the process is gone."""
        await asyncio.get_running_loop().sock_sendall(self._channel, encode_frame(config))

    async def receive(self, deadline: float) -> list[PollResult] | None:
        """Return the next messages, or None at the end of the process. Raises TimeoutError, MalformedMessage."""
        try:
            async with asyncio.timeout_at(deadline):
                data = await asyncio.get_running_loop().sock_recv(self._channel, READ_BYTES)
        except TimeoutError:
            # The event loop may have been late: read messages that arrived meanwhile before declaring a hang.
            try:
                data = self._channel.recv(READ_BYTES)
            except BlockingIOError:
                raise TimeoutError from None
        return self._decoder.feed(data) if data else None

    @property
    def has_exited(self) -> bool:
        return self._process.poll() is not None

    async def kill(self) -> str:
        """Kill the process and describe how it ended. May be called again."""
        self._channel.close()
        ending = await end_child(self._process, KILL_WAIT_S)
        self._activity_page.close()
        return ending


MAX_BACKLOG_AGE_S = 900.0
"""Maximum age in seconds of kernel log lines that an agent without saved state reads. The cause of an older line has
been cured, or shows in NVML. A fresh installation must not evict a node for the XID of last month."""

MAX_RECENT_LINES, MAX_RECENT_CHARACTERS = 500, 500
"""Lines of the kernel log that are kept in memory for a bundle of logs, and characters of each."""

LOG_BURST_PAUSE_S = 0.01
"""Seconds between two portions of an endless kernel log, so that the event loop's other work runs."""


MAX_SHOWN_ERROR = 1000
"""Characters of a policy's mistakes that a finding shows; the log has all."""


class SensorMonitor:
    """Sense a node. ``on_report`` receives a report at every poll, and at once when a finding appears or clears. It is
    called in the event loop, and must not block. Raises ConfigurationError if a policy or a scenario cannot be used."""

    def __init__(self, settings: SensorSettings, clock: Clock, on_report: Callable[[SensorReport], None]) -> None:
        self._settings = settings
        self._clock = clock
        self._on_report = on_report
        self._scenario = load_scenario(settings.virtual, settings.node) if settings.virtual else None
        saved = load_sensor_state(settings.state_path)
        boot_id = _boot_id(settings, self._scenario)
        folder = Path(settings.profile_folder) if settings.profile_folder else None
        self._profile_store = ProfileStore(folder, self._now().monotonic)
        self._policy = PolicyWatch(settings.site_policy, saved.policy_texts)
        self._policy_loaded_at = clock.wall()
        self._assessor = FindingAssessor(
            self._policy.policy,
            settings.node,
            settings.expected_gpus,
            saved.assessor_state,
            self._now(),
            self._profile_store.profile,
        )
        self._assessor.process_boot(boot_id)
        self._log = _kernel_log(settings, saved, boot_id)
        self._log_failed = False
        self._child: SensorChild | None = None
        self._exiting_children: list[SensorChild] = []
        self._poll = PollResult(is_full=True, boot_id=boot_id)
        self._polled_at = 0.0
        self._hangs = self._crashes = self._restarts = 0
        self._skew_s: float | None = None
        self._recent_lines: deque[str] = deque(maxlen=MAX_RECENT_LINES)

    @property
    def recent_kernel_lines(self) -> tuple[str, ...]:
        """The newest lines of the kernel log, cut to MAX_RECENT_CHARACTERS: a pipe cannot be read twice."""
        return tuple(self._recent_lines)

    @property
    def pid(self) -> int | None:
        """The pid of the running sensor process."""
        return None if self._child is None else self._child.pid

    @property
    def report(self) -> SensorReport:
        """Everything known now."""
        return SensorReport(
            poll=self._poll,
            polled_at=self._polled_at,
            findings=self._assessor.findings,
            xid_counts=self._assessor.xid_history.totals,
            line_counts=dict(self._assessor.lines.totals),
            sensor_restarts=self._restarts,
            policy_loaded_at=self._policy_loaded_at,
            is_policy_current=not self._policy.error,
        )

    def set_clock_skew(self, skew_s: float) -> None:
        """Set this node's clock minus the controller's, as measured by the heartbeat."""
        self._skew_s = skew_s

    async def run(self) -> None:
        """Sense until cancelled, then end the sensor process."""
        if self._policy.error:
            self._report_policy_error()
        if self._assessor.findings:
            self._on_report(self.report)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._run_sensor_processes())
                if self._log is not None:
                    tasks.create_task(self._follow_kernel_log(self._log))
                if self._settings.site_policy:
                    self._save_state()  # the files in force
                    tasks.create_task(self._follow_policy())
        finally:
            for child in self._exiting_children:
                await child.kill()
            if self._log is not None:
                self._log.close()
            self._save_state()
            self._profile_store.save(self._now().monotonic, is_final=True)
            if self._settings.virtual_folder:
                remove_tree(Path(self._settings.virtual_folder))

    # Sensor process

    async def _run_sensor_processes(self) -> None:
        backoff = Backoff(floor_s=self._settings.restart_floor_s, ceiling_s=self._settings.restart_ceiling_s)
        while True:
            await self._run_one_process()
            self._restarts += 1
            failures = self._hangs + self._crashes
            # No fleet shares this back-off, so the delay needs no jitter.
            await asyncio.sleep(backoff.delay_s(max(0, failures - 1), 1.0))

    async def _run_one_process(self) -> None:
        child = self._child = SensorChild()
        self._exiting_children = [child, *(other for other in self._exiting_children if not other.has_exited)]
        reason, hung = "", False
        try:
            await child.configure(self._build_config())
            await self._receive_polls(child)
        except TimeoutError:
            hung = True
            self._handle_hang(child)
        except (OSError, MalformedMessage) as error:
            reason = str(error)
        finally:
            self._child = None
            how = await child.kill()
        if not hung:
            self._handle_crash(reason or how)

    async def _receive_polls(self, child: SensorChild) -> None:
        """Process the child's messages until it ends. Raises TimeoutError when a poll is overdue."""
        loop = asyncio.get_running_loop()
        patience_s = self._settings.interval_s + self._settings.hang_timeout_s
        deadline = loop.time() + self._settings.start_timeout_s
        while (messages := await child.receive(deadline)) is not None:
            for message in messages:
                self._process_message(message)
                if message.is_full:
                    deadline = loop.time() + patience_s

    def _build_config(self) -> SensorConfig:
        settings = self._settings
        return SensorConfig(
            interval_s=settings.interval_s,
            slow_every=settings.slow_every,
            sysfs_root=settings.sysfs_root,
            proc_root=settings.proc_root,
            disk_paths=settings.disk_paths,
            vault_folder=settings.vault_folder,
            watch_units=settings.watch_units,
            scenario=self._scenario,
            control_file=settings.virtual_control,
            reads_gpm=settings.reads_gpm,
            pause_file=settings.pause_file,
            hang_timeout_s=settings.hang_timeout_s,
            start_timeout_s=settings.start_timeout_s,
            machine_folder=settings.virtual_folder,
            is_resumed=self._restarts > 0,
        )

    def _process_message(self, message: PollResult) -> None:
        now = self._now()
        if message.is_full:
            self._hangs = self._crashes = 0
            self._poll, self._polled_at = message, now.wall
            changed = self._assessor.process_poll(message, self._skew_s, now)
            self._profile_store.take_orders()
            self._profile_store.save(now.monotonic)
        else:
            changed = self._assessor.process_kernel_lines(message.kernel_lines, now)
            changed |= self._assessor.process_xid_events(message.xids, now)
        if changed or message.is_full:
            self._publish(changed)

    def _handle_hang(self, child: SensorChild) -> None:
        self._hangs += 1
        detail = f"for {self._settings.hang_timeout_s:g} s at: {child.current_activity}"
        logger.warning("sensor process %d hangs %s", child.pid, detail, extra={"node": self._settings.node})
        self._process_state(SensorState(hangs=self._hangs, detail=detail))

    def _handle_crash(self, reason: str) -> None:
        self._crashes += 1
        logger.warning("the sensor process ended: %s", reason, extra={"node": self._settings.node})
        self._process_state(SensorState(crashes=self._crashes, detail=reason))

    def _process_state(self, state: SensorState) -> None:
        self._publish(self._assessor.process_sensor_state(state, self._now()))

    # Kernel log

    async def _follow_kernel_log(self, log: KernelLog) -> None:
        while True:
            if self._read_kernel_log(log):
                await asyncio.sleep(LOG_BURST_PAUSE_S)
            elif log.wait_descriptor is None:
                # Before the first look too: a log that cannot be read always has news.
                await asyncio.sleep(self._settings.kernel_log_poll_s)
                while not log.has_new_data():
                    await asyncio.sleep(self._settings.kernel_log_poll_s)
            else:
                try:
                    await wait_readable(log.wait_descriptor)
                except OSError:  # epoll cannot wait for every kind of file
                    await asyncio.sleep(self._settings.kernel_log_poll_s)

    def _read_kernel_log(self, log: KernelLog) -> bool:
        """Process one portion, a few milliseconds of work. Returns whether there may be more."""
        lines = log.read()
        self._recent_lines.extend(line[:MAX_RECENT_CHARACTERS] for line in lines)
        changed = self._assessor.process_kernel_lines(lines, self._now())
        if bool(log.error) != self._log_failed:
            self._log_failed = bool(log.error)
            state = SensorState(log_failed=int(self._log_failed), detail=log.error)
            changed |= self._assessor.process_sensor_state(state, self._now())
        if changed:
            self._publish(changed)
        return bool(lines)

    # Policy

    async def _follow_policy(self) -> None:
        while True:
            await asyncio.sleep(self._settings.policy_check_s)
            # In a thread, since the files may be on a server that does not answer, and loading takes 50 ms.
            if await asyncio.to_thread(self._policy.check):
                self._apply_policy()

    def _apply_policy(self) -> None:
        """Judge by the policy that was loaded, or report why it was not."""
        changed = self._process_policy_failure("")  # another error is another finding, with its own message
        if self._policy.error:
            changed |= self._report_policy_error()
        else:
            names = ", ".join(self._settings.site_policy)
            logger.info("the rules in %s were loaded anew", names, extra={"node": self._settings.node})
            changed |= self._assessor.change_policy(self._policy.policy)
            self._policy_loaded_at = self._clock.wall()
        self._publish(changed)
        self._save_state()

    def _report_policy_error(self) -> bool:
        names, error = ", ".join(self._settings.site_policy), self._policy.error
        text = "the rules in %s cannot be loaded, so the earlier ones stay in force: %s"
        logger.warning(text, names, error, extra={"node": self._settings.node})
        return self._process_policy_failure(error[:MAX_SHOWN_ERROR])

    def _process_policy_failure(self, error: str) -> bool:
        state = SensorState(policy_failed=int(bool(error)), detail=error)
        return self._assessor.process_sensor_state(state, self._now())

    # Output

    def _publish(self, has_changed: bool) -> None:
        self._on_report(self.report)
        if has_changed:
            self._save_state()

    def _save_state(self) -> None:
        position = None if self._log is None else self._log.position
        save_sensor_state(
            self._settings.state_path,
            SavedSensorState(
                assessor_state=self._assessor.export_state(), log_position=position, policy_texts=self._policy.texts
            ),
        )

    def _now(self) -> Instant:
        return Instant(self._clock.wall(), self._clock.monotonic())


def _boot_id(settings: SensorSettings, scenario: Scenario | None) -> str:
    """Return the machine's boot id without touching a driver, or "" if it is unknown."""
    if scenario is not None:
        machine = VirtualMachine(scenario, settings.virtual_control, is_resumed=True)
        machine.reload_control()
        return machine.boot_id
    try:
        return sysfs.boot_id(Path(settings.proc_root))
    except OSError:
        return ""


def _kernel_log(settings: SensorSettings, state: SavedSensorState, boot_id: str) -> KernelLog | None:
    if not settings.kernel_log:
        return None
    if is_null_device(settings.kernel_log):
        logger.info("%s: no kernel log is read, so most XIDs will not be seen", settings.kernel_log)
        return None
    position = state.log_position
    if position is not None and state.assessor_state.boot_id == boot_id:
        return KernelLog(settings.kernel_log, position)
    if position is not None:
        # The kernel restarts its numbering at every boot; a file continues where it was.
        position = LogPosition(inode=position.inode, offset=position.offset)
    try:
        not_before_s = sysfs.uptime_s(Path(settings.proc_root)) - MAX_BACKLOG_AGE_S
    except (OSError, ValueError, IndexError):
        not_before_s = 0.0
    return KernelLog(settings.kernel_log, position, not_before_s)
