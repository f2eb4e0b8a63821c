"""Track the committed versions."""

from __future__ import annotations

from everstep.ids import Version
from everstep.wire.v1.directives import ProtectVersion, SpillVersion
from tests.sim.checkers.checker import Violation
from tests.sim.cluster.observations import BatchWritten


class CommittedVersions:
    """The versions whose commit is durable."""

    def __init__(self) -> None:
        self._versions: dict[str, set[Version]] = {}

    def note(self, write: BatchWritten) -> None:
        """Note the commits of a batch."""
        for row in write.batch.versions.values():
            self._versions.setdefault(row.job, set()).add(Version(row.generation, row.step))

    def require(self, checker: str, node: str, body: ProtectVersion | SpillVersion, action: str) -> None:
        """Check that ``node`` is ordered to do ``action`` with a committed version. Raises Violation."""
        if body.version not in self._versions.get(body.job, ()):
            raise Violation(
                checker, f"{body.job}: {node} is ordered to {action} {body.version}, which is not committed"
            )
