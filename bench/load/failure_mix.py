"""A mix of faults for nodes that fail at once, in the proportions of the failure table, as agents report them.

The mix has only causes that a finding shows. Network cards are left out: the rule on ports judges no node in the first
five minutes after boot, and the nodes of a bench are younger.
"""

from __future__ import annotations

import random

from bench import failures
from bench.goodput.symptoms import SYMPTOMS
from bench.load import messages
from everstep.vocabulary import Finding, Severity

FALLEN_OFF_THE_BUS = "xid/79"
FACES = {
    "faulty_gpu": (FALLEN_OFF_THE_BUS, "xid/62", "xid/109", "xid/143", "gpu_lost"),
    "hbm3": ("xid/48", "xid/95", "xid/140", "hbm3"),
    "gpu_sram": ("xid/64", "gpu_sram"),
    "gsp": ("xid/119", "xid/120"),
    "thermal": ("thermal",),
}
"""For each cause of the failure table the faults by which it shows, all equally likely.

The XIDs are those of NVIDIA's catalogue (agent/everstep_agent/policy/xids.csv).
"""
_KINDS = {"gpu_lost": "faulty_gpu", "hbm3": "hbm3", "gpu_sram": "gpu_sram", "thermal": "thermal"}


def mixed(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` names of faults, in the proportions of the failure table."""
    rates = {cause.name: cause.per_gpu_hour for cause in failures.load()}
    weights = {face: rates[cause] / len(faces) for cause, faces in FACES.items() for face in faces}
    return random.Random(seed).choices(list(weights), list(weights.values()), k=count)


def finding(fault: str, since: float) -> Finding:
    """Return the finding that an agent reports for the fault of that name."""
    kind, _, number = fault.partition("/")
    if kind == "xid":
        return messages.xid(int(number), Severity.CRITICAL)
    return SYMPTOMS[_KINDS[fault]].finding(fault, since)
