"""Track the stored records of nodes and jobs, from which a new leader starts."""

from __future__ import annotations

import msgspec

from everstep_controller.core.records import JobRecord, NodeRecord
from everstep_controller.store.rows import Batch


class StoredRecords:
    """The stored documents by name, decoded as the core's own records.

    A field that was moved is then an error, not a default.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, str] = {}
        self._jobs: dict[str, str] = {}

    def note(self, batch: Batch) -> None:
        """Note a batch that became durable."""
        for node in batch.forgotten_nodes:
            self._nodes.pop(node, None)
        for job in batch.forgotten_jobs:
            self._jobs.pop(job, None)
        self._nodes |= batch.nodes
        self._jobs |= batch.jobs

    def node(self, name: str) -> NodeRecord | None:
        """Return a node's record, or None if there is none."""
        doc = self._nodes.get(name)
        return None if doc is None else msgspec.json.decode(doc, type=NodeRecord)

    def nodes(self) -> dict[str, NodeRecord]:
        """Return the records of all nodes by name."""
        return {name: msgspec.json.decode(doc, type=NodeRecord) for name, doc in self._nodes.items()}

    def jobs(self) -> dict[str, JobRecord]:
        """Return the records of all jobs by name."""
        return {name: msgspec.json.decode(doc, type=JobRecord) for name, doc in self._jobs.items()}
