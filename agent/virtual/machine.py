"""The virtual machine at work: the scenario, and over it the control file as it stands now."""

from __future__ import annotations

import os
from typing import TypeVar

import msgspec

from agent.sensors.samples import HostIdentity, HostSample, PathSample, PortSample
from agent.virtual.scenario import Control, Scenario, VirtualGpu, VirtualHost, VirtualPort

S = TypeVar("S", bound=msgspec.Struct)

MAX_CONTROL_BYTES = 1 << 20
IDENTITY = ("address", "pci_bus_id", "board", "firmware")
"""Of a port, in the order of the real driver's words."""


class Machine:
    """What the virtual drivers read. ``refresh`` looks at the control file; a bad one changes nothing but ``error``."""

    def __init__(self, scenario: Scenario, control: str, resumed: bool = False) -> None:
        """``resumed``: another process was this machine before; what the control file asks for has been said."""
        self._scenario = scenario
        self._control = control
        self._silent = resumed
        self._stamp: tuple[int, int, int] | None = None
        self._said = 0
        self._lines: list[str] = []
        self._events: list[tuple[int, int]] = []
        self.error = ""
        self.boot_id = scenario.boot_id
        self.driver_version = scenario.driver_version
        self.nvml_error = scenario.nvml_error
        self.gpus: list[VirtualGpu] = list(scenario.gpu)
        self.host: VirtualHost = scenario.host
        self.ports: dict[str, VirtualPort] = dict(scenario.port)
        self._up = {name for name, port in self.ports.items() if port.up}
        self._raise_xids([VirtualGpu()] * len(self.gpus))

    def refresh(self) -> bool:
        """Takes over a changed control file; True where there was one."""
        if not self._control:
            return False
        try:
            status = os.stat(self._control)
        except FileNotFoundError:
            return False
        stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        self.error = ""
        try:
            with open(self._control, "rb") as file:
                self._apply(msgspec.json.decode(file.read(MAX_CONTROL_BYTES), type=Control))
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self.error = f"control file {self._control}: {_explained(error)}"
        return True

    def take_events(self) -> list[tuple[int, int]]:
        """(GPU index, XID) pairs that have become due since the last call."""
        events, self._events = self._events, []
        return events

    def take_lines(self) -> list[str]:
        """Kernel lines that have become due since the last call."""
        lines, self._lines = self._lines, []
        return lines

    def host_sample(self) -> HostSample:
        host = self.host
        return HostSample(
            uptime_s=host.uptime_s,
            memory_available_fraction=host.memory_available_fraction,
            memory_total_bytes=host.memory_total_bytes,
            stuck_processes=host.stuck_processes,
            zombies=host.zombies,
            load=host.load,
        )

    def host_identity(self) -> HostIdentity:
        host = self.host
        return HostIdentity(
            vendor=host.vendor,
            product=host.product,
            serial=host.serial,
            chassis_serial=host.chassis_serial,
            kernel=host.kernel,
        )

    def port_samples(self) -> tuple[PortSample, ...]:
        self._up |= {name for name, port in self.ports.items() if port.up}
        return tuple(
            PortSample(
                name=name,
                kind=port.kind,
                up=port.up,
                was_up=name in self._up,
                rate_gbps=port.rate_gbps,
                errors=port.errors,
                link_downs=port.link_downs,
                identity={name: text for name in IDENTITY if (text := getattr(port, name))},
            )
            for name, port in self.ports.items()
        )

    def path_samples(self) -> tuple[PathSample, ...]:
        host = self.host
        return (PathSample(path="/", network=False, free_fraction=host.free_fraction, silent_s=host.mount_silent_s),)

    def _apply(self, control: Control) -> None:
        before, scenario = self.gpus, self._scenario
        gpus = [_changed(gpu, control.gpus.get(str(i), {}), f"gpus.{i}") for i, gpu in enumerate(scenario.gpu)]
        strangers = control.gpus.keys() - {str(index) for index in range(len(gpus))}
        if strangers:
            raise ValueError(f"no GPU {', '.join(sorted(strangers))}: this machine has {len(gpus)}, from 0")
        strangers = control.ports.keys() - scenario.port.keys()
        if strangers:
            raise ValueError(f"no port {', '.join(sorted(strangers))}: there are {', '.join(sorted(scenario.port))}")
        ports = {n: _changed(p, control.ports.get(n, {}), f"ports.{n}") for n, p in scenario.port.items()}
        self.host = _changed(scenario.host, control.host, "host")
        self.gpus, self.ports = gpus, ports
        self.boot_id = scenario.boot_id if control.boot_id is None else control.boot_id
        self.nvml_error = scenario.nvml_error if control.nvml_error is None else control.nvml_error
        silent, self._silent = self._silent, False
        if not silent:
            self._lines += control.lines[self._said :]
            self._raise_xids(before)
        self._said = len(control.lines)

    def _raise_xids(self, before: list[VirtualGpu]) -> None:
        """Says the XIDs that are new against ``before``, as the driver does: in the log and as an event."""
        if self._silent:
            return
        for index, (old, new) in enumerate(zip(before, self.gpus, strict=True)):
            if new.xid is not None and new.xid != old.xid:
                self._events.append((index, new.xid))
                self._lines.append(f"NVRM: Xid (PCI:{new.pci_bus_id}): {new.xid}, raised by the control file")


def _changed(base: S, changes: dict[str, msgspec.Raw], where: str) -> S:
    if not changes:
        return base
    values = {field: getattr(base, field) for field in base.__struct_fields__}
    for key, raw in changes.items():
        if key not in values:
            raise ValueError(_stranger(key, tuple(values), where))
        values[key] = msgspec.json.decode(raw)
    return msgspec.convert(values, type(base))


def _stranger(key: str, known: tuple[str, ...], where: str) -> str:
    import difflib  # here, since only who mistypes needs it

    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean `{near[0]}`?" if near else f"known are {', '.join(known)}"
    return f"unknown key `{key}` in {where}; {hint}"


def _explained(error: Exception) -> str:
    message = str(error)
    if "unknown field `" in message:
        key = message.partition("`")[2].partition("`")[0]
        return _stranger(key, Control.__struct_fields__, "the control file")
    return message
