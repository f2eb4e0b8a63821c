"""Orders of the controller to a vault: executed once, requested again after a loss, and answered."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any, cast

from everstep.clock import ManualClock
from everstep.errors import StaleGeneration, Unavailable
from everstep.ids import Version
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import local
from everstep.wire.v1.directives import ProtectVersion, SpillVersion
from everstep.wire.v1.local import Protect, Protected, RequestFailed, Spill, Spilled
from everstep.wire.v1.training import AnyReport, Holder, PeerConnectionLost
from everstep.wire.v1.vault_reports import ParityGroup, VersionProtected, VersionSpilled
from everstep_agent.vault.job_table import JobTable
from everstep_agent.vault.manager import VaultAnswer, VaultManager, VaultOrderRunner
from everstep_agent.vault.transfer.peers import PeerLossDetector
from tests.support.processes.waiting import until
from tests.support.vaults.vault_process import JOB, SECRET, RankMemory, Vaults, noise

VERSION = Version(1, 100)
SPILL = SpillVersion(job="job", generation=1, version=VERSION, url="/s/job", writers={"n1": (0,)}, keep_last=2)


class Vault:
    """A stand-in for the vault's manager; requests wait here until the test answers them."""

    def __init__(self) -> None:
        self.known = True
        self.asked: list[Any] = []
        self.futures: list[asyncio.Future[VaultAnswer]] = []

    def is_configured(self, job: str) -> bool:
        return self.known

    async def request(self, message: Any) -> VaultAnswer:
        self.asked.append(message)
        self.futures.append(asyncio.get_running_loop().create_future())
        return await self.futures[-1]


class Node:
    def __init__(self) -> None:
        self.vault = Vault()
        self.reports: list[AnyReport] = []
        self.orders = VaultOrderRunner("n1", cast(VaultManager, self.vault), self.reports.append, SYSTEM_CLOCK)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def answer(self, answer: VaultAnswer, which: int = -1) -> None:
        self.vault.futures[which].set_result(answer)
        await self.settle()

    async def take(self, order: SpillVersion | ProtectVersion) -> None:
        self.orders.submit(order)
        await self.settle()


def _group(number: int) -> ParityGroup:
    return ParityGroup(group=number, members=((0, "a"), (1, "b")), parity=("n1", "c"))


def test_spill_order_is_carried_out_and_reported() -> None:
    async def story() -> None:
        node = Node()
        await node.take(SPILL)
        (asked,) = node.vault.asked
        assert asked == Spill(
            request=0, job="job", generation=1, version=VERSION, url="/s/job", writers={"n1": (0,)}, keep_last=2
        )
        await node.answer(
            Spilled(request=0, folder="step-1", bytes=7, complete=True, removed=("step-0",), remaining=("step-1",))
        )
        (report,) = node.reports
        assert isinstance(report, VersionSpilled)
        assert (report.url, report.bytes, report.complete, report.removed) == ("/s/job/step-1", 7, True, ("step-0",))
        assert report.remaining == ("step-1",)

    asyncio.run(story())


def test_failure_is_reported_except_for_a_stale_generation() -> None:
    async def story() -> None:
        node = Node()
        for code in (StaleGeneration.code, Unavailable.code):
            await node.take(SPILL)
            await node.answer(RequestFailed(request=0, code=code, message="why"))
        (report,) = node.reports
        assert isinstance(report, VersionSpilled)
        assert (report.code, report.message) == (Unavailable.code, "why")

    asyncio.run(story())


def test_parity_of_all_groups_is_reported_once() -> None:
    async def story() -> None:
        node = Node()
        groups = tuple(_group(number) for number in range(6))
        await node.take(ProtectVersion(job="job", generation=1, version=VERSION, groups=groups, keep=(Version(1, 50),)))
        assert all(isinstance(asked, Protect) and asked.keep == (Version(1, 50),) for asked in node.vault.asked)
        done = 0
        while done < len(groups):
            for which in range(done, len(node.vault.asked)):
                await node.answer(Protected(request=which, parity="P", members_digest=f"m{which}"), which)
                done += 1
        (report,) = node.reports
        assert isinstance(report, VersionProtected)
        assert report.members_digests == {number: f"m{number}" for number in range(6)}

    asyncio.run(story())


def test_failed_parity_group_ends_the_order() -> None:
    async def story() -> None:
        node = Node()
        await node.take(ProtectVersion(job="job", generation=1, version=VERSION, groups=(_group(0), _group(1))))
        await node.answer(Protected(request=0, parity="P", members_digest="m"), 0)
        await node.answer(RequestFailed(request=1, code="not_found", message="gone"), 1)
        (report,) = node.reports
        assert isinstance(report, VersionProtected)
        assert (report.code, report.members_digests) == ("not_found", {0: "m"})

    asyncio.run(story())


def test_order_of_an_unknown_or_forgotten_job_is_dropped() -> None:
    async def story() -> None:
        node = Node()
        node.vault.known = False
        await node.take(SPILL)
        assert not node.vault.asked
        node.vault.known = True
        await node.take(SPILL)
        node.orders.cancel_job("job")
        await node.settle()
        assert node.vault.futures[0].cancelled()
        assert not node.reports
        await node.take(SPILL)
        node.orders.close()
        await node.settle()
        assert node.vault.futures[1].cancelled()

    asyncio.run(story())


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


class PeerWatcher:
    """The detector of n1 for lost peers, with its reports; n2's vault has the given ``address``."""

    def __init__(self, address: str) -> None:
        self.reported: list[PeerConnectionLost] = []
        self.clock = ManualClock()
        self.book = JobTable()
        holders = (Holder(node="n2", vault=address),)
        self.book.configure(local.ConfigureJob(request=1, job=JOB, generation=1, secret=SECRET, holders=holders))
        self.detector = PeerLossDetector("n1", self.book, self.clock, self.reported.append)

    def report_after_break(self) -> list[PeerConnectionLost]:
        """Return the report of a broken connection after all checks."""
        self.detector.report_broken_connection(JOB, "n2", "it broke")
        until(lambda: not any(t.name == "witness" for t in threading.enumerate()), "the look is over")
        return self.reported


def closed_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"127.0.0.1:{closed.getsockname()[1]}"


def test_closed_connection_to_a_serving_vault_is_no_loss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as serving:
        assert PeerWatcher(f"127.0.0.1:{serving.getsockname()[1]}").report_after_break() == []


def test_ended_job_or_ending_vault_reports_no_lost_peer() -> None:
    watcher = PeerWatcher(closed_address())
    watcher.book.forget(JOB)
    assert watcher.report_after_break() == []
    ending = PeerWatcher(closed_address())
    ending.detector.close()
    assert ending.report_after_break() == []
