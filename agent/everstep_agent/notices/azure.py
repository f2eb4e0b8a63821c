"""Notices of Azure: scheduled events, which list the virtual machines that they concern.

Source: Azure documentation, "Scheduled Events for Linux VMs". Events are only read and never approved: an approval
would let Azure begin at once, for all machines of the event.
"""

from __future__ import annotations

from everstep_agent.notices.metadata import MetadataService
from everstep_agent.notices.notice import Notice, NoticeError, clip, decode_json, parse_time

EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
DRAINING_TYPES = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Events that end or restart the machine. A freeze pauses it for seconds."""


class AzureService(MetadataService):
    """The instance metadata service. It is asked once for this machine's name, because events concern several."""

    name = "azure"
    headers = {"Metadata": "true"}

    def __init__(self, base_url: str = "") -> None:
        super().__init__(base_url)
        self._machine = ""
        self.parsers = {EVENTS_PATH: lambda body: parse_events(body, self._machine)}

    async def read(self, path: str, now: float) -> list[Notice]:
        """Return the notices about this machine. Raises Unreachable or NoticeError."""
        if not self._machine:
            answer = await self.get(NAME_PATH)
            name = answer.body.decode("utf-8", "replace").strip()
            if answer.status != 200 or not name:
                raise NoticeError(f"no name of this machine: status {answer.status}")
            self._machine = name
        return await super().read(path, now)


def parse_events(body: bytes, machine: str) -> list[Notice]:
    """Parse the scheduled events that concern ``machine``."""
    found = decode_json(body)
    events = found.get("Events") if isinstance(found, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise NoticeError("no list of events")
    return [_read_event(event) for event in events if _concerns(event, machine)]


def _concerns(event: dict[str, object], machine: str) -> bool:
    names = event.get("Resources")
    is_known = event.get("EventType") in (*DRAINING_TYPES, "Freeze")
    return is_known and isinstance(names, list) and machine.lower() in [str(name).lower() for name in names]


def _read_event(event: dict[str, object]) -> Notice:
    kind, not_before = clip(event["EventType"]), event.get("NotBefore")
    description = clip(event.get("Description") or "no description")
    return Notice(
        subject=f"azure/{clip(event.get('EventId') or kind)}",
        message=f"Azure has scheduled a {kind.lower()} of this machine ({description})",
        deadline=parse_time(not_before) if not_before else None,  # empty once the event has begun
        drains=kind in DRAINING_TYPES,
        is_scheduled=True,
    )
