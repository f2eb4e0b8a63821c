"""Samples of a GPU's NVLinks: state, counters and far end of each link by its number.

Fields 161 to 163 count errors up to Hopper. Blackwell does not offer them, and offers fields 206 to 222, 235 to 250 and
289 to 293 instead. All of them are asked for with the link as scope, and one that is not offered stays None.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep_agent.drivers.gpu_samples import LinkSample
from everstep_agent.drivers.nvml import MAX_NVLINKS, GpuDevice, kernel_bus_id

REPLAYS, RECOVERIES, CRC_ERRORS = 161, 162, 163
PACKET_ERRORS = (206, 207, 208, 209, 210, 211)
"""Malformed packets, buffer overruns, receive errors (own, remote, general), local link integrity."""
DISCARDS = 212
RECOVERY_FAILURES = 214
RECOVERY_EVENTS = 215
EFFECTIVE_ERRORS, EFFECTIVE_BER, SYMBOL_ERRORS, SYMBOL_BER = 219, 220, 221, 222
FEC_HISTORY = tuple(range(235, 251))
"""Blocks by the number of symbols that forward error correction repaired in them: 0 to 15."""
RAW_ERRORS_LANE_0, RAW_ERRORS_LANE_1, RAW_BER = 289, 290, 293
REMOTE_LINK = 146
"""Numbers of nvml.h: NVML_FI_DEV_NVLINK_*."""

SWITCH = "NVSwitch"
FAR_DEVICES = {0: "GPU", 1: "CPU", 2: SWITCH}
"""Devices at the other end of a link (nvml.h, nvmlIntNvLinkDeviceType_t); 1 is IBM's POWER9."""

_COUNTERS = (
    *(REPLAYS, RECOVERIES, CRC_ERRORS),
    *PACKET_ERRORS,
    *(DISCARDS, RECOVERY_FAILURES, RECOVERY_EVENTS),
    *(EFFECTIVE_ERRORS, EFFECTIVE_BER, SYMBOL_ERRORS, SYMBOL_BER),
    *FEC_HISTORY,
    *(RAW_ERRORS_LANE_0, RAW_ERRORS_LANE_1, RAW_BER),
)


@dataclass(eq=False)
class NvLinks:
    """The links of one GPU. The object outlives the library, because it knows which links were ever up."""

    seen_up: set[int] = field(default_factory=set)
    far_ends: dict[int, str] = field(default_factory=dict)

    def read(self, device: GpuDevice) -> tuple[LinkSample, ...]:
        """Return a sample of each link that the GPU has."""
        states = {link: device.read("nvmlDeviceGetNvLinkState", link) for link in range(MAX_NVLINKS)}
        self.seen_up.update(link for link, state in states.items() if state)
        return tuple(
            self._read_link(device, link, state)
            for link, state in states.items()
            if state is not None or link in self.seen_up
        )

    def _read_link(self, device: GpuDevice, link: int, state: int | None) -> LinkSample:
        found = dict(zip(_COUNTERS, device.read_fields([(number, link) for number in _COUNTERS]), strict=True))
        if state and link not in self.far_ends and (far_end := _far_end(device, link)):
            self.far_ends[link] = far_end
        bins = [step for step, number in enumerate(FEC_HISTORY) if found[number]]
        recoveries = found[RECOVERIES] if found[RECOVERY_EVENTS] is None else found[RECOVERY_EVENTS]
        return LinkSample(
            link=link,
            up=None if state is None else bool(state),
            was_up=link in self.seen_up,
            errors=total(found[number] for number in (REPLAYS, RECOVERIES, CRC_ERRORS, *PACKET_ERRORS)),
            recoveries=recoveries,
            recovery_failures=found[RECOVERY_FAILURES],
            discards=found[DISCARDS],
            effective_errors=found[EFFECTIVE_ERRORS],
            symbol_errors=found[SYMBOL_ERRORS],
            raw_errors=total((found[RAW_ERRORS_LANE_0], found[RAW_ERRORS_LANE_1])),
            effective_ber=decode_ber(found[EFFECTIVE_BER]),
            symbol_ber=decode_ber(found[SYMBOL_BER]),
            raw_ber=decode_ber(found[RAW_BER]),
            repaired_symbols=None if found[FEC_HISTORY[0]] is None else max(bins, default=0),
            far_end=self.far_ends.get(link, ""),
        )


def decode_ber(value: int | None) -> float | None:
    """Return a bit error rate: the exponent of 1/10 stands in bits 0 to 7, the factor in bits 8 to 11 (nvml.h,
    NVML_NVLINK_BER_*)."""
    return None if value is None else float(value >> 8 & 0xF) * 10.0 ** -(value & 0xFF)


def total(values: Iterable[int | None]) -> int | None:
    """Return the sum of the known values, or None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _far_end(device: GpuDevice, link: int) -> str:
    """Return the device and link at the other end, such as ``NVSwitch 0000:c1:00 link 30``; less if NVML knows less.

    A switch that is no PCI device of this machine, as in a rack of NVL72, has no address.
    """
    kind = FAR_DEVICES.get(device.read("nvmlDeviceGetNvLinkRemoteDeviceType", link), "")
    pci = device.read("nvmlDeviceGetNvLinkRemotePciInfo", link)
    (remote_link,) = device.read_fields([(REMOTE_LINK, link)])
    address = "" if pci is None else _address(pci.busId)
    where = f"link {remote_link}" if remote_link is not None and (kind or address) else ""
    return " ".join(filter(None, (kind, address, where)))


def _address(bus_id: str | bytes) -> str:
    """Return NVML's address as in the kernel log; nothing for an unknown one, which is empty or all zeros."""
    text = bus_id.decode() if isinstance(bus_id, bytes) else bus_id
    return kernel_bus_id(text) if text.count(":") == 2 and set(text) - set("0:.") else ""
