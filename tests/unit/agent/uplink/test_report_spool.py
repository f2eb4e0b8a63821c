"""Unsent reports: numbered, bounded, batched, and kept for the agent's next start."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from everstep.ids import Version
from everstep.vocabulary import AuditKind, AuditRole
from everstep.wire.v1.training import (
    AnyReport,
    AuditsClean,
    AuditStatement,
    RankLost,
    VersionSealed,
)
from everstep_agent.uplink.spool import Spool
from tests.support.agents.uplinks import lost


def sealed(step: int, *, rank: int = 0, safe: bool = True, digests: dict[str, str] | None = None) -> VersionSealed:
    version = Version(1, step)
    return VersionSealed(
        job="j", at=0.0, generation=1, rank=rank, version=version, bytes=10, durable=safe, digests=digests or {}
    )


def stated() -> AuditStatement:
    words = {"audit": AuditKind.PEER_REPLAY, "unit": "layer 0", "owner": 0, "role": AuditRole.OWNER}
    return AuditStatement(job="j", at=0.0, generation=1, rank=0, step=3, original="a", digest="b", **words)  # type: ignore[arg-type]


def a_spool(file: Path | None = None, *, most_reports: int = 64, most_bytes: int = 1 << 20) -> Spool:
    return Spool(file, max_reports=most_reports, max_bytes=most_bytes, batch_window_s=0.1)


def bodies(spool: Spool) -> list[AnyReport]:
    return [n.body for n in spool.next_batch()]


def test_urgent_report_is_due_at_once_and_seal_after_window() -> None:
    spool = a_spool()
    assert spool.wait_s(5.0) is None
    spool.add(sealed(1), 5.0)
    assert spool.wait_s(5.0) == pytest.approx(0.1)
    assert spool.wait_s(6.0) == 0.0
    spool.add(lost(), 5.0)
    assert spool.wait_s(5.0) == 0.0


def test_reports_stay_until_they_are_acknowledged() -> None:
    spool = a_spool()
    for rank in range(3):
        spool.add(lost(rank), 0.0)
    assert len(spool.next_batch()) == 3
    spool.acknowledge(2)
    assert [n.number for n in spool.next_batch()] == [3]
    spool.acknowledge(3)
    assert len(spool) == 0
    assert spool.size_bytes == 0


def test_later_seal_replaces_the_earlier_and_keeps_digests() -> None:
    spool = a_spool()
    spool.add(sealed(1, safe=False, digests={"params": "aa"}), 0.0)
    spool.add(sealed(1, safe=True), 0.05)
    assert bodies(spool) == [sealed(1, safe=True, digests={"params": "aa"})]
    assert spool.wait_s(0.1) == 0.0  # as due as the first word was


def test_full_spool_drops_oldest_seals_before_losses() -> None:
    spool = a_spool(most_reports=64)
    spool.add(lost(), 0.0)
    for step in range(200):
        spool.add(sealed(step), 0.0)
    kept = bodies(spool)
    assert len(kept) <= 64
    assert kept[0] == lost()
    assert kept[-1] == sealed(199)
    assert spool.dropped_count == 201 - len(kept)


def test_clean_audits_wait_and_are_dropped_like_seals(tmp_path: Path) -> None:
    spool = a_spool(tmp_path / "reports", most_reports=64)
    spool.add(stated(), 0.0)
    for step in range(200):
        spool.add(AuditsClean(job="j", at=0.0, generation=1, rank=0, step=step), 0.0)
    assert bodies(spool)[0] == stated()
    assert len(spool) <= 64
    assert bodies(a_spool(tmp_path / "reports")) == [stated()]


def test_request_is_bounded_in_reports_and_bytes() -> None:
    spool = a_spool(most_reports=5000, most_bytes=64 << 20)
    for rank in range(1500):
        spool.add(lost(rank), 0.0)
    assert len(spool.next_batch()) == 1024
    assert len(spool.next_batch(10)) == 10
    big = a_spool(most_reports=5000, most_bytes=64 << 20)
    for rank in range(1000):
        big.add(RankLost(job="j", at=0.0, generation=1, rank=rank, local_rank=0, detail="x" * 4000), 0.0)
    assert 100 < len(big.next_batch()) < 140


@pytest.mark.promise("reports-survive")
def test_spool_recovers_reports_of_a_killed_agent(tmp_path: Path) -> None:
    file = tmp_path / "reports"
    first = a_spool(file)
    first.add(sealed(1), 0.0)
    first.add(lost(), 0.0)
    assert file.stat().st_mode & 0o777 == 0o600
    assert bodies(a_spool(file)) == [lost()]  # a seal is worth no write to the disk: the next step brings another


def test_recovered_spool_skips_acknowledged_reports(tmp_path: Path) -> None:
    first = a_spool(tmp_path / "reports")
    for rank in range(3):
        first.add(lost(rank), 0.0)
    first.acknowledge(2)
    assert bodies(a_spool(tmp_path / "reports")) == [lost(2)]


def test_record_torn_by_the_crash_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "reports"
    first = a_spool(file)
    first.add(lost(0), 0.0)
    first.add(lost(1), 0.0)
    file.write_bytes(file.read_bytes()[:-5])
    assert bodies(a_spool(file)) == [lost(0)]


def test_spool_damage_loses_only_later_records(tmp_path: Path) -> None:
    file = tmp_path / "reports"
    first = a_spool(file)
    first.add(lost(0), 0.0)
    whole = file.stat().st_size
    first.add(lost(1), 0.0)
    content = bytearray(file.read_bytes())
    content[whole + 6] ^= 0xFF
    file.write_bytes(content)
    assert bodies(a_spool(file)) == [lost(0)]


def test_spool_file_is_bounded_and_empty_once_acknowledged(tmp_path: Path) -> None:
    file = tmp_path / "reports"
    spool = a_spool(file, most_bytes=10_000)
    for step in range(2000):
        spool.add(sealed(step), 0.0)
        if step > 5:
            spool.acknowledge(step - 5)
    assert file.stat().st_size <= 4 * 10_000 + 1000
    spool.acknowledge(5000)
    assert file.stat().st_size == 0


def test_seals_of_an_ended_generation_are_dropped() -> None:
    """Their slots are filled again. A controller that took over without a newer generation would commit the seals."""
    spool = a_spool()
    spool.add(sealed(1, safe=False), 0.0)
    spool.next_batch()
    spool.add(sealed(1), 0.0)
    spool.add(lost(), 0.0)
    newer, others = (msgspec.structs.replace(sealed(2), generation=2), msgspec.structs.replace(sealed(1), job="k"))
    spool.add(newer, 0.0)
    spool.add(others, 0.0)
    spool.drop_seals("j", before_generation=2)
    assert bodies(spool) == [lost(), newer, others]
    assert spool.dropped_count == 0
