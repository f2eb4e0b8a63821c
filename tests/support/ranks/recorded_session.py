"""A training session that copies tracked state after each step, and can begin from such a copy."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.state.tracked_objects import as_list

Version = dict[str, Any]


class RecordedSession(TrainingSession):
    """A session without an agent. ``versions``: tracked state by finished step. ``restored``: the version to load.

    ``sections`` has the names of the sections of work, in the order in which they began.
    """

    def __init__(self, versions: dict[int, Version] | None = None, restored: int = 0) -> None:
        self.versions = {} if versions is None else versions
        self._restored = restored
        self._objects: Mapping[str, Any] = {}
        self.sections: list[str] = []

    def track(self, objects: Mapping[str, object], options: SnapshotOptions) -> int:
        self._objects = objects
        if self._restored:
            version = deepcopy(self.versions[self._restored])
            for key, tracked in objects.items():
                for tracked_object, state in zip(as_list(tracked), version[key], strict=True):
                    tracked_object.load_state_dict(state)  # type: ignore[attr-defined]
        return self._restored

    def on_step_finished(self, step: int) -> None:
        self.versions[step] = {
            key: [deepcopy(tracked_object.state_dict()) for tracked_object in as_list(tracked)]  # type: ignore[attr-defined]
            for key, tracked in self._objects.items()
        }

    def alone(self, name: str, limit_s: float | None) -> AbstractContextManager[None]:
        self.sections.append(name)
        return nullcontext()
