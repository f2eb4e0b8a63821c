"""Recoveries of a run in Weights & Biases, MLflow and TensorBoard, also where rank 0 itself was killed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.frameworks.framework_run import run_training
from tests.support.processes.launcher import SLOW_RANKS
from tests.support.ranks.exact_training import Fault

STEPS, WORLD, JOB = 14, 2, "tracked"
pytestmark = [pytest.mark.slow, pytest.mark.frameworks("wandb", "mlflow", "tensorboard")]


def trained(folder: Path, *faults: Fault, **environment: str) -> tuple[dict[int, Any], str]:
    """Each step's loss and state, which all ranks and generations have alike, and what the launcher printed."""
    environment |= {"OMP_NUM_THREADS": "1", **SLOW_RANKS}
    rows, printed = run_training(
        folder, "tracked_training", STEPS, *faults, ranks=WORLD, options=["--job", JOB], **environment
    )
    steps: dict[int, Any] = {}
    for row in rows:
        assert steps.setdefault(row["step"], (row["loss"], row["state"])) == (row["loss"], row["state"])
    return steps, printed


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline file: LevelDB's log format after a header of 7 bytes; a cut record ends it."""
    record, at, block = b"", 7, 32_768
    while at + 7 <= len(data):
        if block - at % block < 7:  # no room for a header
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part = data[at + 7 : at + 7 + length]
        if not kind or len(part) < length:
            return
        record, at = record + part, at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def wandb_rows(folder: Path) -> tuple[set[str], list[dict[str, str]]]:
    """The run ids and the rows of history in offline files, as JSON texts by name."""
    from wandb.proto import wandb_internal_pb2

    ids, rows = set(), []
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add(record.run.run_id)
            if record.HasField("history"):
                rows.append({"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item})
    return ids, rows


@pytest.mark.filterwarnings("ignore")  # the trackers' own: deprecations
def test_trackers_resume_after_rank_0_was_killed(short_path: Path) -> None:
    undisturbed, _ = trained(short_path / "u", TRACKED="0")
    folder = short_path / "k"
    steps, printed = trained(folder, Fault(0, 5, "begun"), Fault(1, 10, "updated"))
    assert steps == undisturbed
    assert "the disk of this tracker is full" in printed
    assert "is left out; training continues" in printed
    check_wandb(folder)
    check_mlflow(folder, undisturbed)
    check_tensorboard(folder, undisturbed)


def check_wandb(folder: Path) -> None:
    ids, rows = wandb_rows(folder)
    assert ids == {JOB}
    assert {float(row["everstep/generation"]) for row in rows if "everstep/lost_s" in row} == {2.0, 3.0}
    causes = [row["everstep/cause"] for row in rows if "everstep/cause" in row]
    assert len(causes) == 2
    assert "rank 0" in causes[0]
    assert "rank 1" in causes[1]


def check_mlflow(folder: Path, undisturbed: dict[int, Any]) -> None:
    from mlflow import MlflowClient

    from tests.integration.frameworks.scripts.tracked_training import mlflow_uri

    client = MlflowClient(mlflow_uri(folder))
    known = client.get_experiment_by_name("tracked")
    (run,) = client.search_runs([known.experiment_id])
    assert run.info.status == "FINISHED"
    assert "rank 0" in run.data.tags["everstep.regroup.2"]
    assert "rank 1" in run.data.tags["everstep.regroup.3"]
    lost = {row.step: row.value for row in client.get_metric_history(run.info.run_id, "everstep/lost_s")}
    totals = [row.value for row in client.get_metric_history(run.info.run_id, "everstep/total_lost_s")]
    assert len(lost) == 2
    assert all(value > 0.0 for value in lost.values())
    assert totals == pytest.approx([min(totals), sum(lost.values())]), "the new rank 1 and the old rank 0 agree"
    assert run.data.metrics["everstep/regroups"] == 2.0
    losses = {row.step: row.value for row in client.get_metric_history(run.info.run_id, "loss")}
    assert losses.items() <= {step: loss for step, (loss, _) in undisturbed.items()}.items()
    assert losses.keys() >= {*range(min(lost), STEPS + 1)}, "all since the process that lives on is rank 0"


def check_tensorboard(folder: Path, undisturbed: dict[int, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert len({step for step, _ in losses}) == len(losses), "steps computed again replace the earlier ones"
    assert all(value == pytest.approx(undisturbed[step][0]) for step, value in losses)
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("everstep/cause/text_summary")]
    assert ["rank 0" in texts[0], "rank 1" in texts[1]] == [True, True]
