"""Verdicts posted to a URL, one at a time and in order, from a thread of their own.

The body is the verdict in JSON. ``Everstep-Signature`` is ``sha256=`` and the HMAC-SHA256 of the body under the
webhook's own secret, in hex; ``Everstep-Verdict`` is the verdict's id, by which a receiver drops repeats.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import logging
import queue
import threading
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from controller.remediation.base import ACTED_ON
from everstep.backoff import Backoff
from everstep.errors import ConfigurationError
from everstep.vocabulary import Verdict

log = logging.getLogger(__name__)

ATTEMPTS = 6
TIMEOUT_S = 5.0
CLOSE_S = 0.3
"""Seconds for the post under way when the controller ends; its thread ends with the process otherwise."""
BACKLOG = 1000
"""Verdicts that may wait for a receiver that is away; more are dropped, and counted."""


def signature(secret: bytes, body: bytes) -> str:
    """The value of ``Everstep-Signature``."""
    return "sha256=" + hmac.new(secret, body, hashlib.sha256).hexdigest()


class Webhook:
    """Satisfies ``Remediation``.

    Args:
        url: http or https. Raises ConfigurationError for anything else.
        failed: called for each verdict that was given up.
        uniform: draws from [0, 1), for the jitter between attempts.
    """

    def __init__(
        self,
        url: str,
        secret: bytes,
        *,
        failed: Callable[[], None],
        uniform: Callable[[], float],
        backoff: Backoff | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{url!r} cannot be a webhook: use http://HOST/PATH or https://HOST/PATH")
        self._parts = parts
        self._secret = secret
        self._failed = failed
        self._uniform = uniform
        self._backoff = backoff or Backoff(floor_s=0.1, ceiling_s=30.0)
        self._queue: queue.Queue[Verdict | None] = queue.Queue(BACKLOG)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def verdicts(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            if verdict.decision not in ACTED_ON:
                continue
            try:
                self._queue.put_nowait(verdict)
            except queue.Full:
                self._give_up(verdict, f"{BACKLOG} verdicts wait already")

    def close(self) -> None:
        self._over.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the thread looks at ``_over`` before each attempt
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (verdict := self._queue.get()) is not None and not self._over.is_set():
            self._deliver(verdict)

    def _deliver(self, verdict: Verdict) -> None:
        body = msgspec.json.encode(verdict)
        trouble = ""
        for attempt in range(ATTEMPTS):
            try:
                status = self._post(verdict, body)
            except (OSError, http.client.HTTPException) as error:
                trouble = f"{type(error).__name__}: {error}"
            else:
                if status < 300:
                    return
                trouble = f"it answered {status}"
                if 400 <= status < 500 and status not in (408, 429):
                    break  # it will not think otherwise the next time
            if self._over.wait(self._backoff.delay_s(attempt, self._uniform())):
                break
        self._give_up(verdict, trouble)

    def _post(self, verdict: Verdict, body: bytes) -> int:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._parts.port, timeout=TIMEOUT_S)
        try:
            headers = {
                "Content-Type": "application/json",
                "Everstep-Verdict": verdict.id,
                "Everstep-Signature": signature(self._secret, body),
            }
            path = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
            connection.request("POST", path, body, headers)
            return connection.getresponse().status
        finally:
            connection.close()

    def _give_up(self, verdict: Verdict, why: str) -> None:
        self._failed()
        log.error(
            "the webhook was not told of verdict %s (%s of node %s): %s",
            verdict.id,
            verdict.decision,
            verdict.node,
            why,
            extra={"node": verdict.node, "trace": verdict.trace},
        )
