"""Answers of a webhook: a refused remediation is given up, and any other failure is retried."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from everstep.errors import Conflict, EverstepError, Unavailable
from everstep_controller.core.effects import RemediationKind
from everstep_controller.remediation.webhook import WebhookRemediator
from tests.support.fleet.remediations import remediation
from tests.support.services.webhook_receiver import WebhookReceiver

SECRET = b"the webhook's own secret"


@pytest.fixture
def receiver() -> Iterator[WebhookReceiver]:
    receiver = WebhookReceiver(SECRET)
    yield receiver
    receiver.close()


def webhook(receiver: WebhookReceiver, secret: bytes = SECRET) -> WebhookRemediator:
    return WebhookRemediator(receiver.url, secret, wall=lambda: 1.7e9, cordons=True)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Conflict),
        (403, Conflict),
        (422, Conflict),
        (499, Conflict),
        (408, Unavailable),
        (425, Unavailable),
        (429, Unavailable),
        (500, Unavailable),
        (503, Unavailable),
    ],
)
def test_webhook_status_maps_to_conflict_or_unavailable(
    receiver: WebhookReceiver, status: int, kind: type[EverstepError]
) -> None:
    receiver.status = status
    for ask in (webhook(receiver).apply, webhook(receiver).is_done):
        with pytest.raises(kind, match=f"the webhook answered {status}"):
            ask(remediation(1, RemediationKind.REBOOT))


def test_webhook_refuses_wrong_signature(receiver: WebhookReceiver) -> None:
    with pytest.raises(Conflict, match="answered 401"):
        webhook(receiver, b"another secret").apply(remediation(1, RemediationKind.REBOOT))
    assert receiver.done == {}


def test_webhook_refusal_carries_the_receiver_message(receiver: WebhookReceiver) -> None:
    receiver.answer = lambda remediation: {"state": "refused", "detail": "no reboots on Fridays"}
    with pytest.raises(Conflict, match="no reboots on Fridays"):
        webhook(receiver).apply(remediation(1, RemediationKind.REBOOT))


def test_webhook_unknown_answer_is_retried(receiver: WebhookReceiver) -> None:
    receiver.answer = lambda remediation: {"state": "perhaps"}
    with pytest.raises(Unavailable, match="answer is invalid"):
        webhook(receiver).apply(remediation(1, RemediationKind.REBOOT))
