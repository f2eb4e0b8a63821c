"""Questions of a leader that cannot renew its lease to its agents, and the proofs that it accepts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from everstep.bearer_tokens import epoch_proof
from everstep.clock import ManualClock
from everstep.wire.v1.agent import LeadershipProof
from everstep_controller.auth.credentials import Keyring
from everstep_controller.leadership.leader_checks import CHECKS_PER_SECOND, EpochCheck
from everstep_controller.leadership.lease import LeaseTenure
from everstep_controller.store.database_errors import LeadershipLost
from tests.support.fleet.controllers import SECRET

OTHER = b"the secret of some other fleet.."


class Leader:
    """One that leads by epoch 3."""

    def __init__(self, *secrets: bytes) -> None:
        self.clock = ManualClock()
        self.tenure = LeaseTenure(self.clock, 10.0)
        self.tenure.confirm_renewal(self.clock.monotonic())
        self.doubt = EpochCheck(self.tenure, Keyring(secrets or (SECRET,)), self.clock, 3)

    async def steps_down(self) -> bool:
        try:
            async with asyncio.timeout(0):
                await self.doubt.wait_superseded()
        except TimeoutError:
            return False
        except LeadershipLost:
            return True
        raise AssertionError


def played(story: Callable[[Leader], object], *secrets: bytes) -> bool:
    """Return whether the leader of the story steps down."""

    async def play() -> bool:
        leader = Leader(*secrets)
        story(leader)
        return await leader.steps_down()

    return asyncio.run(play())


def succession(epoch: int, secret: bytes = SECRET) -> LeadershipProof:
    return LeadershipProof(epoch=epoch, proof=epoch_proof(secret, epoch))


def test_epoch_check_asks_few_agents_while_lease_fails() -> None:
    def story(leader: Leader) -> None:
        assert leader.doubt.unconfirmed_epoch() == 0
        leader.tenure.fail_renewal()
        for _ in range(2):
            asked = [leader.doubt.unconfirmed_epoch() for _ in range(CHECKS_PER_SECOND + 5)]
            assert asked == [3] * CHECKS_PER_SECOND + [0] * 5
            leader.clock.advance(1.0)
        leader.tenure.confirm_renewal(leader.clock.monotonic())
        assert leader.doubt.unconfirmed_epoch() == 0

    assert not played(story)


def test_epoch_check_steps_down_for_proven_higher_epoch() -> None:
    def story(leader: Leader) -> None:
        leader.tenure.fail_renewal()
        leader.doubt.take_proof(succession(4))
        leader.doubt.take_proof(succession(5))

    assert played(story)
    assert played(story, OTHER, SECRET)


@pytest.mark.promise("cut-off-leader")
@pytest.mark.parametrize(
    "proof",
    [
        succession(3),
        succession(4, OTHER),
        msgspec.structs.replace(succession(4), epoch=5),
        msgspec.structs.replace(succession(4), proof="\u00fc"),
    ],
    ids=["its own epoch", "of another fleet", "of another epoch", "no proof"],
)
def test_epoch_check_ignores_unproven_epoch(proof: LeadershipProof) -> None:
    def story(leader: Leader) -> None:
        leader.tenure.fail_renewal()
        leader.doubt.take_proof(proof)

    assert not played(story)


def test_epoch_check_is_inactive_while_lease_renews() -> None:
    assert not played(lambda leader: leader.doubt.take_proof(succession(4)))


def test_epoch_check_accepts_proof_of_another_controller() -> None:
    async def play() -> bool:
        newer = EpochCheck(Leader().tenure, Keyring((SECRET,)), ManualClock(), 4)
        older = Leader()
        older.tenure.fail_renewal()
        older.doubt.take_proof(msgspec.convert(newer.proof_fields(), LeadershipProof))
        return await older.steps_down()

    assert asyncio.run(play())
