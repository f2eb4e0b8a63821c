"""What stands wrong is posted when it changes, and again now and then, in the form of Alertmanager's webhooks."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from controller.core.events import NodeObserved
from controller.remediation.alerting import REPEAT_S, RETRY_S, Alerting
from controller.remediation.alerts import MOST, Alert, alerts_of, payload
from controller.remediation.base import MARK, Standing
from controller.remediation.dry_run import DryRun
from controller.remediation.observer import Observer
from everstep.errors import ConfigurationError
from tests.support.core_fleet import CoreFleet, xid


class Inbox:
    """A receiver of alerts."""

    def __init__(self) -> None:
        self.posts: list[dict[str, Any]] = []
        self.status = 200
        self.tokens: set[str | None] = set()
        inbox = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                inbox.tokens.add(self.headers["Authorization"])
                if inbox.status == 200:
                    inbox.posts.append(body)
                self.send_response(inbox.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/alerts"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    made = Inbox()
    yield made
    made.close()


class Watch:
    """Alerting over a fleet."""

    def __init__(self, inbox: Inbox) -> None:
        self.fleet = CoreFleet()
        self.fleet.start(4, 1)
        self.failures = 0
        self.alerting = Alerting(
            inbox.url,
            token="a token",
            controller="http://c:1",
            state=self.fleet.state,
            now=lambda: self.fleet.now,
            failed=self._failed,
        )

    def _failed(self) -> None:
        self.failures += 1

    def look(self) -> None:
        asyncio.run(self.alerting.look())


def _names(post: dict[str, Any]) -> list[tuple[str, str]]:
    return [(alert["labels"]["alertname"], alert["status"]) for alert in post["alerts"]]


def test_a_fleet_that_is_well_posts_nothing(inbox: Inbox) -> None:
    watch = Watch(inbox)
    watch.look()
    watch.fleet.now += REPEAT_S + 1
    watch.look()
    assert inbox.posts == []


def test_an_evicted_node_is_told_repeated_and_told_as_resolved(inbox: Inbox) -> None:
    watch = Watch(inbox)
    watch.fleet.raise_finding("n2", xid())
    watch.look()
    watch.look()
    assert [_names(post) for post in inbox.posts] == [[("EverstepNodeOut", "firing")]]
    (alert,) = inbox.posts[0]["alerts"]
    assert alert["labels"]["node"] == "n2"
    assert "XID 79" in alert["annotations"]["summary"]
    assert inbox.posts[0]["version"] == "4"
    watch.fleet.now += REPEAT_S + 1
    watch.look()
    assert len(inbox.posts) == 2
    del watch.fleet.state.nodes["n2"]
    watch.look()
    assert _names(inbox.posts[2]) == [("EverstepNodeOut", "resolved")]
    assert inbox.posts[2]["status"] == "resolved"
    assert inbox.tokens == {"Bearer a token"}


def test_a_post_that_failed_is_made_good_by_the_next(inbox: Inbox) -> None:
    watch = Watch(inbox)
    watch.fleet.raise_finding("n2", xid())
    inbox.status = 503
    watch.look()
    watch.look()
    assert watch.failures == 1
    inbox.status = 200
    watch.fleet.now += RETRY_S
    watch.look()
    assert [_names(post) for post in inbox.posts] == [[("EverstepNodeOut", "firing")]]


def test_the_breaker_a_paused_job_and_an_absent_database_are_told_first(inbox: Inbox) -> None:
    fleet = CoreFleet()
    fleet.start(2, min_nodes=2)
    fleet.state.fleet.breaker, fleet.state.store_away = "the budget is used up", "the disk is full"
    fleet.leave("n1")
    names = [alert.labels["alertname"] for alert in alerts_of(fleet.state, fleet.now)]
    assert names == ["EverstepStoreAway", "EverstepBreakerOpen", "EverstepJobPaused"]


def test_a_post_is_bounded_and_says_by_how_much() -> None:
    many = [Alert(labels={"alertname": "X", "node": f"n{i}"}, summary="s", since=0.0) for i in range(MOST + 7)]
    body = json.loads(payload(many, [], 1.0, "http://c"))
    assert (len(body["alerts"]), body["truncatedAlerts"]) == (MOST, 7)
    assert len({alert["fingerprint"] for alert in body["alerts"]}) == MOST


def test_a_receiver_that_cannot_be_is_refused(inbox: Inbox) -> None:
    with pytest.raises(ConfigurationError, match="cannot be a receiver of alerts"):
        Alerting("ftp://x", token="", controller="", state=CoreFleet().state, now=lambda: 0.0, failed=lambda: None)


# --- cordons of others -------------------------------------------------------------------------------------------


class Shown(DryRun):
    """A scheduler that shows ``nodes``."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[str, Standing] = {}

    def standing(self, nodes: Any) -> dict[str, Standing]:
        return self.nodes


def test_a_persons_cordon_is_told_once_and_its_end_too_and_ours_never() -> None:
    fleet, shown, told = CoreFleet(), Shown(), list[NodeObserved]()
    fleet.start(3)

    async def tell(event: NodeObserved) -> None:
        told.append(event)
        fleet.feed(event)

    observer = Observer(shown, fleet.state, tell)
    shown.nodes = {
        "n1": Standing(cordoned_by="ada", reason="a fan"),
        "n2": Standing(cordoned_by=MARK, reason="everstep x"),
        "n9": Standing(cordoned_by="ada"),
    }
    asyncio.run(observer.look())
    asyncio.run(observer.look())
    assert [(event.node, event.cordoned_by, event.reason) for event in told] == [("n1", "ada", "a fan")]
    shown.nodes = {}
    asyncio.run(Observer(shown, fleet.state, tell).look())
    assert [(event.node, event.cordoned_by) for event in told[1:]] == [("n1", "")]
