"""What a vault says of peers whose connection broke."""

from __future__ import annotations

import socket
import threading

from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.transfer.peers import PeerLossDetector

from everstep.clock import ManualClock
from everstep.ids import Version
from everstep.wire.v1 import local
from everstep.wire.v1.training import Holder, PeerConnectionLost
from tests.support.vaults import JOB, SECRET, RankMemory, Vaults, noise
from tests.support.waiting import until


def replicated(fleet: Vaults, step: int = 1) -> RankMemory:
    """n1 and n2 with a proved connection between them: n1's rank has a copy at n2."""
    source, _ = fleet.start("n1"), fleet.start("n2")
    fleet.configure()
    rank = RankMemory(source.client(), rank=0)
    rank.fill(0, Version(1, step), noise(4096))
    answer = rank.sealed(0, Version(1, step), to=["n2"])
    assert isinstance(answer, local.Replicated), answer
    assert answer.nodes == ("n2",)
    return rank


def test_copy_target_reports_the_death_of_the_source_at_once(fleet: Vaults) -> None:
    replicated(fleet)
    fleet.all[0].kill()
    lost = fleet.supervisors["n2"].peer_lost()
    assert (lost.job, lost.peer) == (JOB, "n1")
    assert "refused" in lost.detail
    assert lost.trace


def test_copy_source_reports_the_death_of_the_target_once(fleet: Vaults) -> None:
    rank = replicated(fleet)
    fleet.all[1].kill()
    for slot in (1, 2):
        rank.fill(slot, Version(1, slot + 1), noise(4096))
        rank.sealed(slot, Version(1, slot + 1), to=["n2"])
    supervisor = fleet.supervisors["n1"]
    assert supervisor.peer_lost().peer == "n2"
    assert isinstance(supervisor.ask(local.Statistics), local.StatisticsAnswer)
    assert not supervisor.peers_lost


class Bystander:
    """A witness of n1 whose words stay here; n2's vault is said to be at ``address``."""

    def __init__(self, address: str) -> None:
        self.told: list[PeerConnectionLost] = []
        self.clock = ManualClock()
        self.book = JobTable()
        holders = (Holder(node="n2", vault=address),)
        self.book.configure(local.ConfigureJob(request=1, job=JOB, generation=1, secret=SECRET, holders=holders))
        self.witness = PeerLossDetector("n1", self.book, self.clock, self.told.append)

    def broke(self) -> list[PeerConnectionLost]:
        """What was said of a break, once every look is over."""
        self.witness.report_broken_connection(JOB, "n2", "it broke")
        until(lambda: not any(t.name == "witness" for t in threading.enumerate()), "the look is over")
        return self.told


def nowhere() -> str:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"127.0.0.1:{closed.getsockname()[1]}"


def test_closed_connection_to_a_serving_vault_is_no_loss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as serving:
        assert Bystander(f"127.0.0.1:{serving.getsockname()[1]}").broke() == []


def test_broken_peer_is_reported_at_most_once_a_second() -> None:
    bystander = Bystander(nowhere())
    assert len(bystander.broke()) == 1
    assert len(bystander.broke()) == 1
    bystander.clock.advance(1.0)
    assert len(bystander.broke()) == 2


def test_ended_job_or_ending_vault_reports_no_lost_peer() -> None:
    bystander = Bystander(nowhere())
    bystander.book.forget(JOB)
    assert bystander.broke() == []
    ending = Bystander(nowhere())
    ending.witness.close()
    assert ending.broke() == []
