"""Methods of frameworks that run inside a section of work."""

from __future__ import annotations

import gc

import pytest

from everstep_trainer.integrations.adapter_parts.sections import work_alone
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from tests.support.ranks.recorded_session import RecordedSession


class Saver:
    def save(self, step: int, *, late: bool = False) -> tuple[int, bool]:
        """Save a step."""
        if step < 0:
            raise ValueError(step)
        return step, late


def test_method_runs_inside_its_section() -> None:
    session, saver, other = RecordedSession(), Saver(), Saver()
    run = Run(RankContext(), session)
    work_alone(run, saver, save="checkpoint", upload="upload")
    assert saver.save(3, late=True) == (3, True)
    assert other.save(1) == (1, False)
    with pytest.raises(ValueError, match="-1"):
        saver.save(-1)
    assert session.sections == ["checkpoint", "checkpoint"]
    assert saver.save.__doc__ == "Save a step."
    assert not hasattr(saver, "upload")


def test_object_that_outlives_its_run_takes_the_next_one() -> None:
    sessions, saver = [RecordedSession(), RecordedSession()], Saver()
    for session in sessions:
        run = Run(RankContext(), session)
        work_alone(run, saver, save="checkpoint")
        saver.save(1)
    assert [session.sections for session in sessions] == [["checkpoint"]] * 2
    del run
    gc.collect()
    assert saver.save(2) == (2, False)
    assert sessions[1].sections == ["checkpoint"], "the run is gone, and its section with it"
