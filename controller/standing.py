"""Which findings the database has of each node.

They are written one by one, as they come and go, and not with their node's record: of a node whose kernel log has gone
mad hundreds stand, and every line of it would write them all again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from controller.core.records import NodeRecord
from everstep.ids import NodeId
from everstep.vocabulary import Finding


class StandingFindings:
    """What was written last, or is about to be. Findings are frozen: one that is the same object has not changed."""

    def __init__(self, nodes: Iterable[NodeRecord]) -> None:
        self._written: dict[NodeId, dict[str, Finding]] = {}
        for record in nodes:
            self._note(record)

    def changes(self, record: NodeRecord) -> Iterator[tuple[str, Finding | None]]:
        """The findings of a node by key that are to be written, None for those that stand no more; they count as
        written from now on."""
        written = self._written.get(record.node, {})
        if not written and not record.findings:
            return
        for key in written:
            if key not in record.findings:
                yield key, None
        for key, finding in record.findings.items():
            if written.get(key) is not finding:
                yield key, finding
        self._note(record)

    def forget(self, node: NodeId) -> None:
        """The database has nothing of the node any more."""
        self._written.pop(node, None)

    def _note(self, record: NodeRecord) -> None:
        if record.findings:
            self._written[record.node] = dict(record.findings)
        else:
            self._written.pop(record.node, None)


def without_findings(record: NodeRecord) -> NodeRecord:
    """The record as its document has it."""
    return msgspec.structs.replace(record, findings={})
