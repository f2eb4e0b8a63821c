"""A training session without Everstep: what a run tracks is copied after each step, and can be loaded into another."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from everstep_trainer.runtime.generation_session import TrainingSession
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.state.tracked_objects import as_list

Version = dict[str, Any]


class RecordedSession(TrainingSession):
    """``versions`` holds what was tracked, by the finished step; ``restored``: the step to begin with."""

    def __init__(self, versions: dict[int, Version] | None = None, restored: int = 0) -> None:
        self.versions = {} if versions is None else versions
        self._restored = restored
        self._objects: Mapping[str, Any] = {}

    def track(self, objects: Mapping[str, object], options: SnapshotOptions) -> int:
        self._objects = objects
        if self._restored:
            version = deepcopy(self.versions[self._restored])
            for key, tracked in objects.items():
                for one, state in zip(as_list(tracked), version[key], strict=True):
                    one.load_state_dict(state)  # type: ignore[attr-defined]
        return self._restored

    def on_step_finished(self, step: int) -> None:
        self.versions[step] = {
            key: [deepcopy(one.state_dict()) for one in as_list(tracked)]  # type: ignore[attr-defined]
            for key, tracked in self._objects.items()
        }
