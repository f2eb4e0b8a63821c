"""How the sensors of a node are set."""

from __future__ import annotations

import msgspec

from everstep.errors import ConfigurationError


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
