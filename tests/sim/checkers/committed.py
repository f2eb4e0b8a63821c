"""Which versions the records say are committed, as far as that is durable."""

from __future__ import annotations

from everstep.ids import Version
from everstep.wire.v1.directives import ProtectVersion, SpillVersion
from tests.sim import facts
from tests.sim.facts import Violation


class Committed:
    """Nothing but a committed version is kept by parity, or goes to storage."""

    def __init__(self) -> None:
        self._versions: dict[str, set[Version]] = {}

    def note(self, fact: facts.Durable) -> None:
        for row in fact.batch.versions.values():
            self._versions.setdefault(row.job, set()).add(Version(row.generation, row.step))

    def require(self, checker: str, node: str, body: ProtectVersion | SpillVersion, what: str) -> None:
        """Raises Violation where ``node`` is told to do ``what`` with another version."""
        if body.version not in self._versions.get(body.job, ()):
            raise Violation(checker, f"{body.job}: {node} is to {what} {body.version}, which is not committed")
