from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import MAX_GAUGED_GPUS, Gpu, GpuGauges
from tests.support.fleet.controllers import LONG_SILENCE_POLICY, VIEWER, AgentClient, InProcess, Refused, get

GPUS = tuple(
    Gpu(index=number, uuid=f"GPU-{number}", name="H200", pci_bus_id=f"0000:0{number}:00.0", memory_bytes=141 << 30)
    for number in range(2)
)
HOT = GpuGauges(index=1, temperature_c=91, power_w=700.0, throttled_by=("hardware_thermal",), ecc_uncorrected=1)


@pytest.fixture
def served(tmp_path: Path) -> InProcess:
    return InProcess(f"sqlite:///{tmp_path / 'c.db'}", policy=LONG_SILENCE_POLICY)


@pytest.fixture
def client(served: InProcess) -> Iterator[TestClient]:
    with TestClient(served) as client:
        yield client


def gpus_of(client: TestClient, node: str = "n1") -> op.NodeGpus:
    gpus: op.NodeGpus = get(client, f"/v1/nodes/{node}/gpus", op.NodeGpus)
    return gpus


def test_node_shows_its_newest_gauges(client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register(gpus=GPUS)
    assert gpus_of(client).received_at is None
    assert [gpu.temperature_c for gpu in gpus_of(client).gpus] == [None, None]
    agent.beat(findings=(), gpu_gauges=(HOT,))
    agent.beat()
    found = gpus_of(client)
    assert found.received_at is not None
    assert found.gpus[0] == op.GpuStatus(index=0, uuid="GPU-0", name="H200", memory_bytes=141 << 30)
    assert (found.gpus[1].uuid, found.gpus[1].temperature_c, found.gpus[1].ecc_uncorrected) == ("GPU-1", 91, 1)
    assert found.gpus[1].throttled_by == ("hardware_thermal",)


def test_gauges_change_no_etag_and_write_nothing(served: InProcess, client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register(gpus=GPUS)
    agent.beat(findings=())
    before = client.get("/v1/nodes/n1", headers=VIEWER).headers["etag"]
    assert served.controller is not None
    commits = served.controller.metrics.registry.get_sample_value("everstep_controller_commit_seconds_count")
    agent.beat(gpu_gauges=(HOT,))
    assert client.get("/v1/nodes/n1", headers=VIEWER).headers["etag"] == before
    after = served.controller.metrics.registry.get_sample_value("everstep_controller_commit_seconds_count")
    assert after == commits


def test_gauges_of_too_many_gpus_are_refused(client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register(gpus=GPUS)
    agent.beat(gpu_gauges=(HOT,) * MAX_GAUGED_GPUS)
    with pytest.raises(Refused, match=f"length <= {MAX_GAUGED_GPUS}"):
        agent.beat(gpu_gauges=(HOT,) * (MAX_GAUGED_GPUS + 1))
