"""Poll the sources of notices, and report what stands as findings.

A source that does not answer leaves its notices as they were: silence is no withdrawal. The notices are kept on disk,
so that an agent that restarts reports them from its first registration on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.host.private_files import write_private
from everstep.vocabulary import Finding
from everstep_agent.notices.aws import AwsService
from everstep_agent.notices.azure import AzureService
from everstep_agent.notices.gcp import GcpService
from everstep_agent.notices.metadata import MetadataService, Unreachable
from everstep_agent.notices.notice import Notice, NoticeError, to_finding
from everstep_agent.notices.notice_file import FILE_NAME, read_notice_file

log = logging.getLogger(__name__)

MAX_RETRY_S = 60.0
"""Longest pause, in seconds, between attempts to reach a service that does not answer."""
MAX_NOTICES = 32
"""Maximum notices of one source; no machine has more."""
SERVICES: dict[str, type[MetadataService]] = {"aws": AwsService, "gcp": GcpService, "azure": AzureService}


class _SavedNotices(msgspec.Struct, frozen=True):
    """Contents of ``notices.state``."""

    boot_id: str
    notices: dict[str, tuple[Notice, ...]]
    first_seen: dict[str, float]


def detect_provider(root: Path = Path("/")) -> str:
    """Return the cloud whose machine this is by its DMI tables, or "". Sends nothing."""

    def read(name: str) -> str:
        try:
            return (root / "sys/class/dmi/id" / name).read_text(errors="replace").strip()
        except OSError:
            return ""

    if read("sys_vendor") == "Amazon EC2" or "amazon" in read("bios_version").lower():
        return "aws"
    if read("sys_vendor") == "Google":
        return "gcp"
    # Other machines of Hyper-V have the same vendor; this tag marks those of Azure.
    return "azure" if read("chassis_asset_tag") == "7783-7084-3265-9085-8269-3286-77" else ""


def open_service(provider: str, url: str) -> MetadataService | None:
    """Return the metadata service of ``provider`` ("auto": by the DMI tables), or None if no service is to be read."""
    name = detect_provider() if provider == "auto" else provider
    if provider == "auto":
        log.info("notices: %s", f"this is a machine of {name}" if name else "this machine belongs to no known cloud")
    return SERVICES[name](url) if name else None


class NoticeWatch:
    """The notices that stand on this node.

    Args:
        service: The metadata service to read; None for the notice file alone.
        run_dir: The agent's run directory, with the notice file and the saved notices.
        poll_s: Seconds between polls.
        lead_s: Seconds before a scheduled event at which the node is drained.
        report: Receives all findings whenever they change.
        boot_id_file: File with the id of this boot.
    """

    def __init__(
        self,
        service: MetadataService | None,
        run_dir: Path,
        poll_s: float,
        lead_s: float,
        clock: Clock,
        report: Callable[[tuple[Finding, ...]], None],
        boot_id_file: Path = Path("/proc/sys/kernel/random/boot_id"),
    ) -> None:
        self._service, self._clock, self._report = service, clock, report
        self._poll_s, self._lead_s = poll_s, lead_s
        self._notice_file, self._state_file = run_dir / FILE_NAME, run_dir / "notices.state"
        self._boot_id = boot_id_file.read_text().strip() if boot_id_file.exists() else ""
        self._notices: dict[str, tuple[Notice, ...]] = {}
        self._first_seen: dict[str, float] = {}
        self._failing: set[str] = set()
        self._findings: tuple[Finding, ...] = ()
        self._retry_s, self._service_due = poll_s, 0.0
        self._load()

    async def run(self) -> None:
        """Report the notices of the last run, then poll for as long as the agent lives."""
        self._publish()
        while True:
            await self.poll()
            await asyncio.sleep(self._poll_s)

    async def poll(self) -> None:
        """Read each source that is due, and report the findings if they changed."""
        before = self._notices.copy()
        try:
            self._keep(FILE_NAME, read_notice_file(self._notice_file, self._clock.wall()))
        except NoticeError as error:
            self._note_failure(FILE_NAME, str(self._notice_file), error)
        if self._service is not None and self._clock.monotonic() >= self._service_due:
            await self._poll_service(self._service)
        self._publish()
        if self._notices != before:
            self._save()

    async def _poll_service(self, service: MetadataService) -> None:
        for path in service.parsers:
            try:
                self._keep(path, await service.read(path, self._clock.wall()))
            except NoticeError as error:
                self._note_failure(path, f"the {service.name} metadata service ({path})", error)
            except Unreachable as error:
                self._note_failure(service.name, f"the {service.name} metadata service", error)
                self._retry_s = min(MAX_RETRY_S, 2 * self._retry_s)
                self._service_due = self._clock.monotonic() + self._retry_s
                return
            else:
                self._note_answer(service.name)
        self._retry_s = self._poll_s

    def _keep(self, source: str, notices: list[Notice]) -> None:
        self._notices.pop(source, None)
        if notices:
            self._notices[source] = tuple(notices[:MAX_NOTICES])
        self._note_answer(source)

    def _note_failure(self, source: str, name: str, error: Exception) -> None:
        if source not in self._failing:
            self._failing.add(source)
            log.info("notices cannot be read from %s and stand as they are: %s", name, error)

    def _note_answer(self, source: str) -> None:
        if source in self._failing:
            self._failing.discard(source)
            log.info("notices of %s can be read again", source)

    def _publish(self) -> None:
        now = self._clock.wall()
        service_now = now + (0.0 if self._service is None else self._service.clock_lead_s)
        standing = {notice.subject: notice for notices in self._notices.values() for notice in notices}
        self._first_seen = {subject: self._first_seen.get(subject, now) for subject in standing}
        findings = tuple(
            to_finding(notice, self._first_seen[key], now if key.startswith("file/") else service_now, self._lead_s)
            for key, notice in standing.items()
        )
        if findings != self._findings:
            self._findings = findings
            self._report(findings)

    def _load(self) -> None:
        """Restore the notices of an earlier run since the same boot; a reboot may be what was announced."""
        try:
            saved = msgspec.json.decode(self._state_file.read_bytes(), type=_SavedNotices)
        except (OSError, msgspec.DecodeError):
            return
        paths = (FILE_NAME, *(self._service.parsers if self._service is not None else ()))
        if saved.boot_id == self._boot_id:
            self._notices = {source: saved.notices[source] for source in paths if source in saved.notices}
            self._first_seen = saved.first_seen

    def _save(self) -> None:
        """Store the notices; without any, no file stays behind."""
        if not self._notices:
            self._state_file.unlink(missing_ok=True)
            return
        saved = _SavedNotices(self._boot_id, self._notices, self._first_seen)
        write_private(self._state_file, msgspec.json.encode(saved) + b"\n")
