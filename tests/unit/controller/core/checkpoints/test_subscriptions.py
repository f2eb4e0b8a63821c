"""The table of what checkpoints do at the moments of a job."""

from __future__ import annotations

from everstep_controller.core.checkpoints.subscriptions import SUBSCRIPTIONS, JobMilestone
from tests.support.fleet.core_fleet import CoreFleet


def test_every_moment_has_a_subscriber() -> None:
    assert SUBSCRIPTIONS.keys() == set(JobMilestone)
    assert all(SUBSCRIPTIONS.values())


def test_regroup_drops_open_votes_and_candidate() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.seal(10)
    fleet.seal(20, 0, 1)
    commits = fleet.state.job_runtime["job"].commits
    assert commits.seals
    assert isinstance(commits.candidate_step, int)
    fleet.leave("n4")
    assert fleet.state.job_runtime["job"].commits.candidate_step is None
    assert not commits.seals
    assert commits.committed_version is not None


def test_pause_drops_open_votes() -> None:
    fleet = CoreFleet()
    fleet.start(4, min_nodes=4)
    fleet.seal(10, 0, 1)
    assert fleet.state.job_runtime["job"].commits.seals
    fleet.leave("n4")
    assert not fleet.state.job_runtime["job"].commits.seals
