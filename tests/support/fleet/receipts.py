"""Receipts of jobs, up to one with recoveries, an eviction, another world size and a version on storage."""

from __future__ import annotations

from typing import Any

import msgspec

from everstep.ids import Version
from everstep.vocabulary import Decision, GenerationReason
from everstep.wire.v1.operator_history import CheckpointCopy
from everstep.wire.v1.receipts import (
    RECEIPT_FORMAT,
    FailureCosts,
    JobReceipt,
    ReceiptEviction,
    ReceiptRecovery,
    WorldSize,
)

BEGAN_AT = 1_795_000_000.0


def recovery(generation: int, after_s: float, duration_s: float | None, **more: Any) -> ReceiptRecovery:
    """Return a recovery of a lost rank. ``more``: further fields, or other values."""
    fields: dict[str, Any] = {
        "reason": GenerationReason.RANK_LOST,
        "sentence": "rank 1 was\nkilled",
        "ranks": 8,
        "phases_s": {"abort": 0.01, "restore": 0.05, "first_step": 0.04},
        "restored": Version(1, 400),
        "repeated_steps": 1,
        "lost_s": (duration_s or 0.0) + 0.1,
        "restart_lost_s": 60 + after_s,
    }
    return ReceiptRecovery(generation=generation, decided_at=BEGAN_AT + after_s, duration_s=duration_s, **fields | more)


def receipt(*recoveries: ReceiptRecovery, **more: Any) -> JobReceipt:
    """Return the receipt of a finished job with these recoveries. ``more``: further fields, or other values."""
    lost_s = sum(recovery.lost_s for recovery in recoveries)
    restart_lost_s = sum(recovery.restart_lost_s for recovery in recoveries)
    made = JobReceipt(
        format=RECEIPT_FORMAT,
        job="llama",
        result="finished",
        sentence="all 8 rank(s) finished at step 900",
        began_at=BEGAN_AT,
        ended_at=BEGAN_AT + 4000.0,
        costs=FailureCosts(
            checkpoint_interval_s=1800.0,
            restart_s=60.0,
            stepping_s=3990.0,
            lost_s=lost_s,
            lost_rank_s=8 * lost_s,
            restart_lost_s=restart_lost_s,
            restart_lost_rank_s=8 * restart_lost_s,
            effective_share=1 - lost_s / 3990.0,
        ),
        steps=900,
        until_step=900,
        step_s=0.1,
        loss=2.25,
        ranks=8,
        nodes=1,
        gpus=8,
        recovery_count=len(recoveries),
        recoveries=recoveries,
        release="1.2.3",
    )
    return msgspec.structs.replace(made, **more)


def full_receipt() -> JobReceipt:
    """Return the receipt of a job that lost a rank, and then a node."""
    evicted = recovery(
        3,
        2000.0,
        1.2,
        reason=GenerationReason.NODE_EVICTED,
        sentence="node-3 is evicted (XID 79: GPU has fallen off the bus)",
        ranks=6,
        phases_s={"rendezvous": 0.4, "build": 0.2, "restore": 0.3, "first_step": 0.1},
    )
    return receipt(
        recovery(2, 100.0, 0.25),
        evicted,
        sizes=(
            WorldSize(at=BEGAN_AT, generation=1, ranks=8),
            WorldSize(at=BEGAN_AT + 2000.0, generation=3, ranks=6),
        ),
        evictions=(
            ReceiptEviction(
                node="node-3",
                decision=Decision.EVICT,
                at=BEGAN_AT + 2000.0,
                sentence="node-3 is evicted (XID 79: GPU has fallen off the bus)",
                rule="gpu.xid.79",
                evidence="XID 79: GPU has fallen off the bus",
            ),
        ),
        versions=(
            CheckpointCopy(
                version=Version(3, 800),
                storage_tier="storage",
                state="complete",
                restorable=True,
                sentence="complete on storage",
                since=BEGAN_AT,
                url="/data/llama/step-800",
            ),
        ),
    )
