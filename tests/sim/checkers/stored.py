"""What the database holds of nodes and jobs, which is all that a controller that takes over knows of them."""

from __future__ import annotations

import msgspec
from everstep_controller.core.records import JobRecord, NodeRecord
from everstep_controller.store.rows import Batch


class Stored:
    """Documents by name, as they were written. They are decoded as the core's own records when they are asked for, so
    that no checker reads a field which records no longer have."""

    def __init__(self) -> None:
        self._nodes: dict[str, str] = {}
        self._jobs: dict[str, str] = {}

    def note(self, batch: Batch) -> None:
        """The batch became durable."""
        for node in batch.forgotten_nodes:
            self._nodes.pop(node, None)
        for job in batch.forgotten_jobs:
            self._jobs.pop(job, None)
        self._nodes |= batch.nodes
        self._jobs |= batch.jobs

    def node(self, name: str) -> NodeRecord | None:
        """The node's record; None if there is none."""
        doc = self._nodes.get(name)
        return None if doc is None else msgspec.json.decode(doc, type=NodeRecord)

    def nodes(self) -> dict[str, NodeRecord]:
        return {name: msgspec.json.decode(doc, type=NodeRecord) for name, doc in self._nodes.items()}

    def jobs(self) -> dict[str, JobRecord]:
        return {name: msgspec.json.decode(doc, type=JobRecord) for name, doc in self._jobs.items()}
