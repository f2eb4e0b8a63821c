"""A leader that cannot reach the database does not know whether it is away for everybody: its agents may find out.

Where it is, training needs this leader. Where only this one is cut off, another one has taken the lease, and agents
that stay here are lost there. Agents reach both, also where the two do not reach one another. So a few of them are
asked to look at the other controllers; what they bring is believed for its proof, and never for who brings it.
"""

from __future__ import annotations

import asyncio
import math

from controller.keeping import Absence
from controller.lease import Tenure
from controller.secret_file import Keyring
from controller.store.trouble import Superseded
from everstep.clock import Clock
from everstep.tokens import epoch_proof, proves_epoch
from everstep.wire.v1.agent import Succession

ASKED_A_SECOND = 16
"""Agents that are asked in each second: one that reaches the other controller is enough, and a whole fleet would be a
load to the controllers that stand by."""
REASON = "the lease cannot be renewed"


class Doubt:
    """What one leadership over a lease asks of its agents.

    Args:
        epoch: by which it leads.
    """

    def __init__(self, tenure: Tenure, keyring: Keyring, clock: Clock, epoch: int) -> None:
        self._tenure = tenure
        self._keyring = keyring
        self._clock = clock
        self._epoch = epoch
        self._second = -math.inf
        self._asked = 0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def unsure_of(self) -> int:
        """What the answer to a beat asks: this leader's epoch, or 0 for nothing."""
        if self._tenure.absent_s() is None:
            return 0
        second = math.floor(self._clock.monotonic())
        if second != self._second:
            self._second, self._asked = second, 0
        self._asked += 1
        return self._epoch if self._asked <= ASKED_A_SECOND else 0

    def hear(self, said: Succession) -> None:
        """What an agent found. Without a proof, or where nothing is in doubt, it is passed over."""
        higher = said.epoch > self._epoch and self._tenure.absent_s() is not None
        if higher and not self._over.done() and proves_epoch(self._keyring.secrets, said.epoch, said.proof):
            error = Superseded(f"the database is out of reach, and another controller leads by epoch {said.epoch}")
            self._over.set_exception(error)

    async def superseded(self) -> None:
        """Waits until it is shown that another controller leads. Raises Superseded then."""
        await asyncio.shield(self._over)

    def absence(self, now: float) -> Absence | None:
        """The database's, as the lease tells of it; ``now`` in the loop's seconds."""
        absent_s = self._tenure.absent_s()
        return Absence(since=now - absent_s, reason=REASON) if absent_s is not None else None

    def shown(self) -> dict[str, object]:
        """What ``/readyz`` tells of this leadership: fields of ``Succession``."""
        return {"epoch": self._epoch, "proof": epoch_proof(self._keyring.secrets[0], self._epoch)}
