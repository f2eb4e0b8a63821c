from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep_controller.read_models.gpu_gauges import GpuGaugeTable
from starlette.testclient import TestClient

from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import MAX_GAUGED_GPUS, Gpu, GpuGauges
from tests.support.controllers import VIEWER, InProcess, Refused, Speaker, get

GPUS = tuple(
    Gpu(index=number, uuid=f"GPU-{number}", name="H200", pci_bus_id=f"0000:0{number}:00.0", memory_bytes=141 << 30)
    for number in range(2)
)
HOT = GpuGauges(index=1, temperature_c=91, power_w=700.0, throttled_by=("hardware_thermal",), ecc_uncorrected=1)


@pytest.fixture
def served(tmp_path: Path) -> InProcess:
    return InProcess(f"sqlite:///{tmp_path / 'c.db'}")


@pytest.fixture
def client(served: InProcess) -> Iterator[TestClient]:
    with TestClient(served) as client:
        yield client


def gpus_of(client: TestClient, node: str = "n1") -> op.NodeGpus:
    return get(client, f"/v1/nodes/{node}/gpus", op.NodeGpus)


def test_node_shows_its_newest_gauges(client: TestClient) -> None:
    speaker = Speaker(client, "n1")
    speaker.register(gpus=GPUS)
    assert gpus_of(client).received_at is None
    assert [gpu.temperature_c for gpu in gpus_of(client).gpus] == [None, None]
    speaker.beat(findings=(), gpu_gauges=(HOT,))
    speaker.beat()
    found = gpus_of(client)
    assert found.received_at is not None
    assert found.gpus[0] == op.GpuStatus(index=0, uuid="GPU-0", name="H200", memory_bytes=141 << 30)
    assert (found.gpus[1].uuid, found.gpus[1].temperature_c, found.gpus[1].ecc_uncorrected) == ("GPU-1", 91, 1)
    assert found.gpus[1].throttled_by == ("hardware_thermal",)


def test_gauges_change_no_tag_and_write_nothing(served: InProcess, client: TestClient) -> None:
    speaker = Speaker(client, "n1")
    speaker.register(gpus=GPUS)
    speaker.beat(findings=())
    before = client.get("/v1/nodes/n1", headers=VIEWER).headers["etag"]
    assert served.controller is not None
    commits = served.controller.metrics.registry.get_sample_value("everstep_controller_commit_seconds_count")
    speaker.beat(gpu_gauges=(HOT,))
    assert client.get("/v1/nodes/n1", headers=VIEWER).headers["etag"] == before
    after = served.controller.metrics.registry.get_sample_value("everstep_controller_commit_seconds_count")
    assert after == commits


def test_gauges_of_an_older_incarnation_are_not_kept(client: TestClient) -> None:
    Speaker(client, "n1", incarnation=2).register(gpus=GPUS)
    with pytest.raises(Refused):
        Speaker(client, "n1", incarnation=1).beat(gpu_gauges=(HOT,))
    with pytest.raises(Refused):
        Speaker(client, "n2").beat(gpu_gauges=(HOT,))
    assert gpus_of(client).received_at is None


def test_gauges_of_too_many_gpus_are_refused(client: TestClient) -> None:
    speaker = Speaker(client, "n1")
    speaker.register(gpus=GPUS)
    speaker.beat(gpu_gauges=(HOT,) * MAX_GAUGED_GPUS)
    with pytest.raises(Refused, match=f"length <= {MAX_GAUGED_GPUS}"):
        speaker.beat(gpu_gauges=(HOT,) * (MAX_GAUGED_GPUS + 1))


def test_gauges_of_eight_gpus_take_little_memory() -> None:
    table = GpuGaugeTable()
    full = GpuGauges(
        index=7,
        temperature_c=61,
        memory_temperature_c=72,
        power_w=644.5,
        power_limit_w=700.0,
        utilization=0.98,
        memory_used_bytes=112 << 30,
        sm_clock_mhz=1755,
        memory_clock_mhz=2619,
        ecc_corrected=10**6,
        ecc_uncorrected=0,
    )
    table.record("n1", (full,) * 8, 1e9)
    assert sys.getsizeof(table._newest["n1"][1]) < 600
