"""What a webhook's answers mean: a remedy that is refused is given up, whatever else goes wrong is asked for again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from everstep_controller.core.effects import RemediationKind
from everstep_controller.remediation.webhook import WebhookRemediator

from everstep.errors import Conflict, EverstepError, Unavailable
from tests.support.hook import Receiver
from tests.support.remedies import remedy

SECRET = b"the webhook's own secret"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver(SECRET)
    yield receiver
    receiver.close()


def webhook(receiver: Receiver, secret: bytes = SECRET) -> WebhookRemediator:
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
def test_a_status_is_a_refusal_or_trouble_that_may_pass(
    receiver: Receiver, status: int, kind: type[EverstepError]
) -> None:
    receiver.status = status
    for ask in (webhook(receiver).apply, webhook(receiver).is_done):
        with pytest.raises(kind, match=f"the webhook answered {status}"):
            ask(remedy(1, RemediationKind.REBOOT))


def test_who_signs_with_another_secret_is_refused(receiver: Receiver) -> None:
    with pytest.raises(Conflict, match="answered 401"):
        webhook(receiver, b"another secret").apply(remedy(1, RemediationKind.REBOOT))
    assert receiver.done == {}


def test_a_remedy_that_the_receiver_refuses_is_given_up_with_its_words(receiver: Receiver) -> None:
    receiver.says = lambda remedy: {"state": "refused", "detail": "no reboots on Fridays"}
    with pytest.raises(Conflict, match="no reboots on Fridays"):
        webhook(receiver).apply(remedy(1, RemediationKind.REBOOT))


def test_an_answer_that_is_not_understood_is_asked_for_again(receiver: Receiver) -> None:
    receiver.says = lambda remedy: {"state": "perhaps"}
    with pytest.raises(Unavailable, match="not understood"):
        webhook(receiver).apply(remedy(1, RemediationKind.REBOOT))
