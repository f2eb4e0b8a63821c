"""A rank is killed and the others regroup: two ranks on one GPU over gloo, and over NCCL where there are two GPUs."""

from __future__ import annotations

from statistics import median

from bench.gpu_steps.sheet import NotRun, Sheet, not_run, require_gpus
from bench.recovery_rows import everstep_runs as runs
from bench.table import Row

KILLS, APART, CPU_APART = 2, 400, 20
FLOOR_S, AIM_S = 10.0, 2.0
"""A rank that steps in makes a CUDA context first."""
VICTIM = 1


def step(sheet: Sheet, device: str) -> None:
    apart = APART if device == "cuda" else CPU_APART
    what = "one GPU" if device == "cuda" else "the CPU"
    sheet.add(*rows(f"gloo, two ranks on {what}", "inexact", runs.Place(2, device, "gloo", apart)))
    if device == "cuda":
        try:
            require_gpus(2)
        except NotRun as error:
            sheet.add(not_run("NCCL, rank killed to the next finished step", str(error)))
        else:
            sheet.add(*rows("NCCL, two ranks on two GPUs", "ddp", runs.Place(2, device, "nccl", apart)))


def rows(name: str, layout: str, place: runs.Place) -> list[Row]:
    """From the kill of a rank to the next step that the other finishes; and the finished steps that were lost."""
    outcome = runs.faults(layout, VICTIM, "between", "KILL", KILLS, place)
    seconds = [recovery.seconds for recovery in outcome.recovered]
    known = [each for each in seconds if each is not None]
    value = median(known) if known and len(known) == KILLS else None
    lost = max((recovery.steps_lost for recovery in outcome.recovered), default=None)
    recovered = f"{len(known)} of {KILLS} recovered"
    return [
        Row(f"{name}: rank killed to the next finished step", value, "s", FLOOR_S, AIM_S, recovered),
        Row(f"{name}: finished steps lost, most", None if lost is None else float(lost), "", 0, 0),
    ]
