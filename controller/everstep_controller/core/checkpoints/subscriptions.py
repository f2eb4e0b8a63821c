"""Subscriptions of the checkpoints to the milestones of a job, in one table.

``jobs`` publishes a milestone and reads no answer. What a version, a spill or parity needs then is decided here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from everstep_controller.core.checkpoints import commits, parity, storage
from everstep_controller.core.records import JobRecord
from everstep_controller.core.transition import Transition


class JobMilestone(Enum):
    """A milestone in the life of a job's generations."""

    GENERATION_ENDS = "generation_ends"
    """The running generation ends: another follows, or the job is paused."""
    SEATS_CHOSEN = "seats_chosen"
    """The seats of the next generation are chosen, and its restore rule is made next."""
    BOUNDARY_ANNOUNCED = "boundary_announced"
    """The running generation ends after the step that the current one names."""
    GENERATION_BEGINS = "generation_begins"
    """The next generation is the current one; orders to vaults go out in its name."""
    RANKS_GONE = "ranks_gone"
    """No rank of the earlier generation counts any more: the current generation begins, or the job is paused."""
    JOB_MAY_STOP = "job_may_stop"
    """The job's processes end in order, or are about to."""
    JOB_ENDED = "job_ended"


SUBSCRIPTIONS: Mapping[JobMilestone, tuple[Callable[[Transition, JobRecord], None], ...]] = {
    JobMilestone.GENERATION_ENDS: (commits.roll_back_open_votes, commits.roll_back_open_cases),
    JobMilestone.SEATS_CHOSEN: (storage.reconsider_spill, parity.reconsider_protection),
    JobMilestone.BOUNDARY_ANNOUNCED: (commits.set_boundary_candidate,),
    JobMilestone.GENERATION_BEGINS: (storage.renew_spill_order, parity.renew_protection_order),
    JobMilestone.RANKS_GONE: (commits.restart_commits,),
    JobMilestone.JOB_MAY_STOP: (storage.spill_newest,),
    JobMilestone.JOB_ENDED: (storage.end_spills, parity.drop_protection),
}
"""Reactions to each milestone, in their order."""


def publish(transition: Transition, job: JobRecord, milestone: JobMilestone) -> None:
    """Let the checkpoints react to a milestone of the job."""
    for react in SUBSCRIPTIONS[milestone]:
        react(transition, job)
