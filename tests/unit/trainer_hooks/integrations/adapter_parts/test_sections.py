"""Methods of frameworks that run inside a section of work."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest

from everstep_trainer.integrations.adapter_parts.sections import work_alone
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession


class NamedSession(TrainingSession):
    """Records the names of sections."""

    def __init__(self) -> None:
        self.sections: list[str] = []

    def alone(self, name: str, limit_s: float | None) -> AbstractContextManager[None]:
        self.sections.append(name)
        return nullcontext()


class Saver:
    def save(self, step: int, *, late: bool = False) -> tuple[int, bool]:
        """Save a step."""
        if step < 0:
            raise ValueError(step)
        return step, late


def test_method_runs_inside_its_section() -> None:
    session, saver, other = NamedSession(), Saver(), Saver()
    work_alone(Run(RankContext(), session), saver, save="checkpoint", upload="upload")
    assert saver.save(3, late=True) == (3, True)
    assert other.save(1) == (1, False)
    with pytest.raises(ValueError, match="-1"):
        saver.save(-1)
    assert session.sections == ["checkpoint", "checkpoint"]
    assert saver.save.__doc__ == "Save a step."
    assert not hasattr(saver, "upload")
