from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from controller.remediation.dry_run import DryRun
from controller.remediation.webhook import Webhook, signature
from everstep.backoff import Backoff
from everstep.errors import ConfigurationError
from everstep.vocabulary import Action, Decision, Verdict

SECRET = b"the webhook's own secret"
AT_ONCE = Backoff(floor_s=0.0, ceiling_s=0.0)


def verdict(number: int, decision: Decision = Decision.EVICT) -> Verdict:
    return Verdict(
        id=f"n1-{number}",
        node="n1",
        decision=decision,
        sentence="it fell off the bus",
        action=Action.REPAIR,
        evidence=(),
        at=1.0,
        trace="t",
    )


class Receiver:
    """What a site's endpoint received; answers with the given statuses in turn, the last one for ever."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.received: list[tuple[Verdict, str, bytes]] = []
        self.changed = threading.Condition()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with receiver.changed:
                    signed = self.headers["Everstep-Signature"]
                    receiver.received.append((msgspec.json.decode(body, type=Verdict), signed, body))
                    status = receiver.statuses.pop(0) if len(receiver.statuses) > 1 else receiver.statuses[0]
                    receiver.changed.notify_all()
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/hook?site=a"

    def wait(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.received) >= count, 20)


@contextmanager
def receiving(*statuses: int) -> Iterator[Receiver]:
    receiver = Receiver(*statuses)
    receiver.thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        receiver.server.server_close()
        receiver.thread.join(10)


@contextmanager
def webhook(url: str, failures: threading.Semaphore) -> Iterator[Webhook]:
    made = Webhook(url, SECRET, failed=failures.release, uniform=lambda: 0.0, backoff=AT_ONCE)
    try:
        yield made
    finally:
        made.close()


def test_verdicts_arrive_in_order_and_signed() -> None:
    with receiving(200) as receiver, webhook(receiver.url, threading.Semaphore(0)) as hook:
        hook.verdicts([verdict(1), verdict(2, Decision.READMIT)])
        receiver.wait(2)
    assert [one.id for one, _, _ in receiver.received] == ["n1-1", "n1-2"]
    assert all(signed == signature(SECRET, body) for _, signed, body in receiver.received)


def test_decisions_that_change_nothing_outside_are_not_told() -> None:
    with receiving(200) as receiver, webhook(receiver.url, threading.Semaphore(0)) as hook:
        hook.verdicts([verdict(1, Decision.NO_ACTION), verdict(2, Decision.HOLD_BY_BUDGET), verdict(3)])
        receiver.wait(1)
    assert [one.id for one, _, _ in receiver.received] == ["n1-3"]


def test_a_receiver_that_stumbles_is_tried_again() -> None:
    with receiving(503, 429, 200) as receiver, webhook(receiver.url, threading.Semaphore(0)) as hook:
        hook.verdicts([verdict(1)])
        receiver.wait(3)
    assert [one.id for one, _, _ in receiver.received] == ["n1-1"] * 3


def test_a_receiver_that_refuses_is_not_asked_again_and_counted() -> None:
    failures = threading.Semaphore(0)
    with receiving(400) as receiver, webhook(receiver.url, failures) as hook:
        hook.verdicts([verdict(1)])
        assert failures.acquire(timeout=20)
    assert len(receiver.received) == 1


def test_nobody_listening_is_counted_and_stops_nothing() -> None:
    failures = threading.Semaphore(0)
    with webhook("http://127.0.0.1:1/hook", failures) as hook:
        hook.verdicts([verdict(1), verdict(2)])
        assert failures.acquire(timeout=20)
        assert failures.acquire(timeout=20)


def test_an_address_that_is_no_web_address_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="http://HOST/PATH"):
        Webhook("file:///etc/passwd", SECRET, failed=lambda: None, uniform=lambda: 0.0)


def test_a_dry_run_says_what_would_be_done(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        DryRun().verdicts([verdict(1), verdict(2, Decision.NO_ACTION)])
    assert [record.getMessage() for record in caplog.records] == [
        "dry run, nothing is done: evict of node n1 (action repair): it fell off the bus"
    ]
