"""Notices of Google Compute Engine: preemption, host maintenance, and maintenance that is announced ahead.

Source: Compute Engine documentation, "Preemptible VM instances" (30 s ahead), "Query metadata server for maintenance
event notices" and "Monitor and plan for a host maintenance event". A virtual machine with GPUs is not migrated but
terminated for host maintenance.
"""

from __future__ import annotations

from everstep_agent.notices.metadata import MetadataService
from everstep_agent.notices.notice import Notice, NoticeError, clip, decode_json, parse_time

PREEMPTION_S = 30.0
"""Seconds between the notice of a preemption and the end of the machine."""


class GcpService(MetadataService):
    """The metadata server, which refuses requests without its header."""

    name = "gcp"
    headers = {"Metadata-Flavor": "Google"}


def parse_preempted(body: bytes) -> list[Notice]:
    """Parse ``TRUE`` or ``FALSE``."""
    word = body.strip().upper()
    if word not in (b"TRUE", b"FALSE"):
        raise NoticeError(f"neither TRUE nor FALSE: {clip(body[:40])}")
    message = "Google Cloud preempts this instance"
    return [Notice(subject="gcp/preempted", message=message, within_s=PREEMPTION_S)] if word == b"TRUE" else []


def parse_maintenance_event(body: bytes) -> list[Notice]:
    """Parse ``NONE``, ``MIGRATE_ON_HOST_MAINTENANCE`` or ``TERMINATE_ON_HOST_MAINTENANCE``."""
    match body.strip():
        case b"NONE":
            return []
        case b"MIGRATE_ON_HOST_MAINTENANCE":
            message = "Google Cloud migrates this instance to another host while it runs"
            return [Notice(subject="gcp/maintenance-event", message=message, drains=False)]
        case b"TERMINATE_ON_HOST_MAINTENANCE":
            message = "Google Cloud will stop this instance for maintenance of its host"
            return [Notice(subject="gcp/maintenance-event", message=message)]
    raise NoticeError(f"an unknown maintenance event: {clip(body[:40])}")


def parse_upcoming(body: bytes) -> list[Notice]:
    """Parse maintenance that is announced ahead, which matters while it is pending or ongoing."""
    found = decode_json(body)
    if not isinstance(found, dict):
        raise NoticeError("no object")
    if str(found.get("maintenance_status", "")).upper() not in ("PENDING", "ONGOING"):
        return []
    deadline = parse_time(found.get("window_start_time"))
    message = f"Google Cloud has announced {clip(found.get('type', '')).lower()} maintenance of this instance's host"
    return [Notice(subject="gcp/upcoming-maintenance", message=message, deadline=deadline, is_scheduled=True)]


GcpService.parsers = {
    "/computeMetadata/v1/instance/preempted": parse_preempted,
    "/computeMetadata/v1/instance/maintenance-event": parse_maintenance_event,
    "/computeMetadata/v1/instance/upcoming-maintenance?alt=json": parse_upcoming,
}
