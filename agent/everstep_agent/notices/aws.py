"""Notices of AWS EC2: the reclaim of a spot instance, scheduled maintenance, a recommendation to rebalance.

Source: EC2 user guide, "Spot Instance interruption notices" (two minutes ahead), "EC2 instance rebalance
recommendations" and "Scheduled events for your instances".
"""

from __future__ import annotations

from everstep_agent.notices.metadata import Answer, MetadataService, fetch
from everstep_agent.notices.notice import Notice, NoticeError, clip, decode_json, parse_time

TOKEN_TTL_S = 21600
"""Seconds that a session token of IMDSv2 is valid, the most that the service grants."""


class AwsService(MetadataService):
    """The instance metadata service, version 2: each request needs a session token."""

    name = "aws"

    def __init__(self, base_url: str = "") -> None:
        super().__init__(base_url)
        self._token = ""

    async def get(self, path: str) -> Answer:
        """Send a request with a session token, and forget the token if it is refused."""
        if not self._token:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            answer = await fetch(self._base_url, "/latest/api/token", ttl, "PUT")
            token = answer.body.decode("ascii", "replace").strip()
            if answer.status != 200 or not token.isprintable() or not token.isascii() or not token:
                raise NoticeError(f"no session token: status {answer.status}")
            self._token = token
        answer = await fetch(self._base_url, path, {"X-aws-ec2-metadata-token": self._token})
        if answer.status == 401:
            self._token = ""
        return answer


def parse_instance_action(body: bytes) -> list[Notice]:
    """Parse ``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``."""
    found = decode_json(body)
    if not isinstance(found, dict) or "action" not in found or "time" not in found:
        raise NoticeError("no action and time in it")
    deadline = parse_time(found["time"])
    message = f"AWS will {clip(found['action'])} this spot instance"
    return [Notice(subject="aws/spot-instance-action", message=message, deadline=deadline)]


def parse_rebalance(body: bytes) -> list[Notice]:
    """Parse a recommendation to rebalance, which announces no end of the instance."""
    if not isinstance(decode_json(body), dict):
        raise NoticeError("no object")
    message = "AWS sees an elevated risk that it will reclaim this spot instance"
    return [Notice(subject="aws/rebalance-recommendation", message=message, drains=False)]


def parse_maintenance(body: bytes) -> list[Notice]:
    """Parse the list of scheduled events. Only active ones are to come; completed and canceled ones are over."""
    events = decode_json(body)
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise NoticeError("no list of events")
    return [_read_event(event) for event in events if str(event.get("State", "")).lower() == "active"]


def _read_event(event: dict[str, object]) -> Notice:
    return Notice(
        subject=f"aws/{clip(event.get('EventId') or event.get('Code'))}",
        message=f"AWS has scheduled {clip(event.get('Code'))} ({clip(event.get('Description'))})",
        deadline=parse_time(event.get("NotBefore")),
        is_scheduled=True,
    )


AwsService.parsers = {
    "/latest/meta-data/spot/instance-action": parse_instance_action,
    "/latest/meta-data/events/maintenance/scheduled": parse_maintenance,
    "/latest/meta-data/events/recommendations/rebalance": parse_rebalance,
}
