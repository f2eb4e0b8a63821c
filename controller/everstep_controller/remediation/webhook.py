"""Post remediations to a site's own URL, whose answers decide their state.

``POST URL`` carries the remediation in JSON. ``Everstep-Remediation`` is its id; a receiver must carry out each id
once. ``Everstep-Signature`` is ``sha256=`` and the HMAC-SHA256, in hex, of ``TIMESTAMP.METHOD.ID.BODY`` under the
webhook's secret. ``Everstep-Timestamp`` is that timestamp in seconds, against replays. The answer, also of ``GET
URL?remediation=ID``, which reads the state back, is JSON: ``{"state": "done" | "pending" | "refused", "detail":
"..."}``.

With ``cordons``, ``GET URL?nodes=a,b`` answers an object with ``{"cordoned_by": "...", "reason": "..."}`` for each
cordoned node, and no remediation is posted for a node that has a cordon of another owner than ``everstep``.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
from collections.abc import Callable, Sequence
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

import msgspec

from everstep.errors import DECODE_ERRORS, ConfigurationError, Conflict, Unavailable
from everstep.ids import NodeId
from everstep_controller.config import is_http_url
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.remediation.remediator import CORDON_OWNER, CordonStatus, foreign_cordon

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20


class HttpReceiver:
    """A URL that remediations or alerts are sent to; each request has its own connection. One thread at a time.

    Raises ConfigurationError for other schemes than http and https. Messages name the receiver by its ``description``.
    """

    def __init__(self, url: str, description: str) -> None:
        if not is_http_url(url):
            raise ConfigurationError(
                f"{url!r} cannot be used as {description}: use http://HOST/PATH or https://HOST/PATH"
            )
        parts = urlsplit(url)
        self.host = parts.hostname or ""
        self._what = description
        self._parts = parts

    def request(
        self, method: str, headers: dict[str, str], body: bytes = b"", query: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Return the status and beginning of the answer. Raises Unavailable without an answer."""
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.host, self._parts.port, timeout=TIMEOUT_S)
        try:
            parameters = "&".join(filter(None, (self._parts.query, urlencode(query or {}))))
            path = (self._parts.path or "/") + (f"?{parameters}" if parameters else "")
            connection.request(method, path, body or None, headers)
            response = connection.getresponse()
            return response.status, response.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{self._what} at {self.host}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()


NODES_PER_REQUEST = 100


class WebhookReply(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver's answer about a remediation."""

    state: Literal["done", "pending", "refused"]
    detail: str = ""


def signature(secret: bytes, timestamp: str, method: str, subject: str, body: bytes) -> str:
    """Return the value of ``Everstep-Signature``."""
    text = f"{timestamp}.{method}.{subject}.".encode() + body
    return "sha256=" + hmac.new(secret, text, hashlib.sha256).hexdigest()


class WebhookRemediator:
    """Implements ``Remediator``. With ``cordons``, the receiver reports who has cordoned a node."""

    name = "webhook"
    dry_run = False
    kinds = frozenset(RemediationKind)

    def __init__(self, url: str, secret: bytes, *, wall: Callable[[], float], cordons: bool = False) -> None:
        self._receiver = HttpReceiver(url, "a webhook")
        self._secret = secret
        self._wall = wall
        self._cordons = cordons

    def apply(self, remediation: Remediation) -> None:
        shown = self.cordon_status([remediation.node]).get(remediation.node, CordonStatus())
        if shown.cordoned_by not in ("", CORDON_OWNER):
            raise foreign_cordon(remediation.node, shown.cordoned_by)
        self._exchange("POST", remediation, msgspec.json.encode(remediation))

    def is_done(self, remediation: Remediation) -> bool:
        return self._exchange("GET", remediation, b"").state == "done"

    def cordon_status(self, nodes: Sequence[NodeId]) -> dict[NodeId, CordonStatus]:
        found: dict[NodeId, CordonStatus] = {}
        for first in range(0, len(nodes) if self._cordons else 0, NODES_PER_REQUEST):
            names = ",".join(nodes[first : first + NODES_PER_REQUEST])
            answer = self._ask("GET", {"nodes": names}, names, b"")
            found |= _decoded(answer, dict[NodeId, CordonStatus])
        return found

    def close(self) -> None:
        pass

    def _exchange(self, method: str, remediation: Remediation, body: bytes) -> WebhookReply:
        query = {} if method == "POST" else {"remediation": remediation.id}
        reply: WebhookReply = _decoded(self._ask(method, query, remediation.id, body), WebhookReply)
        if reply.state == "refused":
            raise Conflict(f"the webhook refuses: {reply.detail or 'no reason given'}")
        return reply

    def _ask(self, method: str, query: dict[str, str], subject: str, body: bytes) -> bytes:
        timestamp = str(int(self._wall()))
        headers = {
            "Content-Type": "application/json",
            "Everstep-Remediation": subject,
            "Everstep-Timestamp": timestamp,
            "Everstep-Signature": signature(self._secret, timestamp, method, subject, body),
        }
        status, answer = self._receiver.request(method, headers, body, query)
        if status < 300:
            return answer
        text = f"the webhook answered {status}: {answer[:200].decode(errors='replace')}"
        if 400 <= status < 500 and status not in (408, 425, 429):
            raise Conflict(text)
        raise Unavailable(text)


def _decoded(answer: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(answer, type=kind)
    except DECODE_ERRORS as error:
        raise Unavailable(f"the webhook's answer is invalid: {error}") from error
