from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.errors import MalformedMessage
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import Gpu, GpuModes, Host, NetworkAdapter
from everstep_controller.core.records import NodeIdentity, NodeLiveness, NodeRecord
from everstep_controller.read_models.hardware_drift import DriftTable, DriftValue, Majority, find_majority
from tests.support.fleet.controllers import LONG_SILENCE_POLICY, VIEWER, AgentClient, InProcess, get

H100 = Gpu(
    index=0,
    uuid="GPU-0",
    name="NVIDIA H100",
    pci_bus_id="0000:1b:00.0",
    memory_bytes=80 << 30,
    part_number="692-2G520-0200-000",
    vbios="96.00.74.00.01",
    inforom="G520.0200.00.05",
)
HOST = Host(vendor="Supermicro", product="SYS-821GE", kernel="5.15.0-119")
FACTS: dict[str, Any] = {
    "gpus": tuple(msgspec.structs.replace(H100, index=number, uuid=f"GPU-{number}") for number in range(8)),
    "host": HOST,
    "driver_version": "575.57",
    "adapters": (NetworkAdapter(board="MT_0000000838", firmware="28.39.1002"),),
    "gpu_modes": GpuModes(ecc="on", mig="off", persistence="on"),
}


def node(name: str, *, reachable: bool = True, **facts: Any) -> NodeRecord:
    identity = NodeIdentity(incarnation=1, vault=f"{name}:1", **(FACTS | facts))
    return NodeRecord(node=name, identity=identity, liveness=NodeLiveness(reachable=reachable))


def nodes(count: int, prefix: str = "n", **facts: Any) -> list[NodeRecord]:
    return [node(f"{prefix}{number:02}", **facts) for number in range(count)]


def gpus(count: int = 8, **fields: Any) -> tuple[Gpu, ...]:
    return tuple(msgspec.structs.replace(gpu, **fields) for gpu in FACTS["gpus"][:count])


def drift_among(records: Iterable[NodeRecord]) -> list[tuple[str, str, str]]:
    """Return node, value and the node's own value of all differences."""
    known = {record.node: record for record in records}
    table = DriftTable()
    asyncio.run(table.refresh(known))
    return [(drift.node, drift.value, drift.actual) for drift in table.page(known, "", 1000).drifts]


@pytest.mark.parametrize(
    ("counts", "majority"),
    [
        ({}, None),
        ({"a": 4}, None),
        ({"a": 5}, Majority("a", 5, 5)),
        ({"a": 3, "b": 3}, None),
        ({"a": 3, "b": 2, "c": 1}, None),
        ({"b": 2, "a": 3}, Majority("a", 3, 5)),
    ],
)
def test_majority_is_more_than_half_of_five(counts: dict[str, int], majority: Majority | None) -> None:
    assert find_majority(counts) == majority


@pytest.mark.parametrize(
    ("facts", "value", "actual"),
    [
        ({"driver_version": "570.86"}, "driver", "570.86"),
        ({"host": msgspec.structs.replace(HOST, kernel="6.8.0-45")}, "kernel", "6.8.0-45"),
        ({"gpus": gpus(7)}, "gpu_count", "7"),
        ({"gpus": (*gpus(7), *gpus(1, memory_bytes=64 << 30))}, "gpu_memory", "64.0 GiB, 80.0 GiB"),
        ({"gpus": gpus(vbios="96.00.30.00.01")}, "vbios", "96.00.30.00.01"),
        ({"gpus": gpus(inforom="G520.0200.00.03")}, "inforom", "G520.0200.00.03"),
        ({"adapters": (NetworkAdapter(board="MT_0000000838", firmware="28.36"),)}, "nic_firmware", "28.36"),
        ({"gpu_modes": GpuModes(ecc="off, on", mig="off", persistence="on")}, "ecc_mode", "off, on"),
        ({"gpu_modes": GpuModes(ecc="on", mig="on", persistence="on")}, "mig_mode", "on"),
        ({"gpu_modes": GpuModes(ecc="on", mig="off", persistence="off")}, "persistence_mode", "off"),
    ],
)
def test_node_differs_from_like_nodes(facts: dict[str, Any], value: str, actual: str) -> None:
    assert drift_among([*nodes(6), node("odd", **facts)]) == [("odd", value, actual)]


UNKNOWN: dict[str, Any] = {
    "host": msgspec.structs.replace(HOST, kernel=""),
    "driver_version": "",
    "gpus": gpus(vbios="", inforom="", memory_bytes=0),
    "adapters": (),
    "gpu_modes": GpuModes(),
}


def test_unknown_values_never_differ() -> None:
    assert drift_among([*nodes(6), node("unknown", **UNKNOWN), node("bare", gpus=(), host=Host())]) == []
    assert drift_among([*nodes(6, **UNKNOWN), node("known")]) == []


def test_other_hardware_is_another_group() -> None:
    other_model = nodes(2, "model", gpus=gpus(name="NVIDIA A100"), driver_version="535.1")
    other_machine = nodes(2, "machine", host=Host(vendor="Dell", product="XE9680", kernel="6.8"), driver_version="1")
    assert drift_among([*nodes(6), *other_model, *other_machine]) == []


def test_firmware_is_compared_between_equal_boards() -> None:
    other_board = node("rma", gpus=gpus(part_number="692-2G520-0202-000", vbios="96.00.89.00.01", inforom="2"))
    unknown_board = node("odm", gpus=gpus(part_number="", vbios="96.00.A5.00.01", inforom="3"))
    other_adapter = node("nic", adapters=(NetworkAdapter(board="MT_0000001070", firmware="40.1"),))
    assert drift_among([*nodes(6), other_board, unknown_board, other_adapter]) == []


def test_machines_with_fewer_gpus_are_a_kind_of_their_own() -> None:
    assert drift_among([*nodes(9), *nodes(5, "half", gpus=gpus(4))]) == []


def test_upgrade_in_progress_has_no_majority_at_half() -> None:
    old, new = nodes(5, "old"), nodes(5, "new", driver_version="580.1")
    assert drift_among([*old, *new]) == []
    assert drift_among([*old, *new, *nodes(5, "newer", driver_version="581.2")]) == []


def test_memory_that_a_new_driver_shows_does_not_differ() -> None:
    upgraded = node("new", driver_version="580.1", gpus=gpus(memory_bytes=(80 << 30) - (700 << 20)))
    assert drift_among([*nodes(6), upgraded]) == [("new", "driver", "580.1")]


def test_sentence_is_neutral_and_marks_offline_nodes() -> None:
    known = {one.node: one for one in [*nodes(31), node("odd", reachable=False, driver_version="570.86")]}
    table = DriftTable()
    asyncio.run(table.refresh(known))
    (drift,) = table.of_node(known["odd"])
    assert (drift.usual_nodes, drift.compared_nodes, drift.is_offline) == (31, 32, True)
    assert drift.kind == "NVIDIA H100 in Supermicro SYS-821GE"
    assert drift.sentence == (
        "differs from 31 of 32 like nodes: driver 570.86 (others 575.57), by the last registration of a node that is "
        "offline"
    )
    assert table.of_node(known["n00"]) == ()


def test_table_follows_registrations_and_forgotten_nodes() -> None:
    odd, gone = node("odd", driver_version="570.86"), node("gone", driver_version="1")
    known = {one.node: one for one in [*nodes(6), odd, gone]}
    table = DriftTable()
    asyncio.run(table.refresh(known))
    assert table.counts() == dict.fromkeys(DriftValue, 0) | {"driver": 2}
    known["odd"].identity = node("odd").identity
    del known["gone"]
    asyncio.run(table.refresh(known))
    assert table.counts() == dict.fromkeys(DriftValue, 0)


def test_pages_follow_each_other_by_node_and_value() -> None:
    odd = nodes(3, "odd", driver_version="570.86", host=msgspec.structs.replace(HOST, kernel="6.8.0-45"))
    known = {one.node: one for one in [*nodes(8), *odd]}
    table, cursor, found = DriftTable(), "", list[tuple[str, str]]()
    asyncio.run(table.refresh(known))
    for size in (4, 2):
        page = table.page(known, cursor, 4)
        assert (len(page.drifts), page.total) == (size, 6)
        found, cursor = [*found, *((drift.node, drift.value) for drift in page.drifts)], page.next
    assert (found, cursor) == ([(one.node, value) for one in odd for value in ("driver", "kernel")], "")
    with pytest.raises(MalformedMessage):
        table.page(known, "odd00", 4)


def test_api_and_metrics_show_drift(tmp_path: Path) -> None:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}", policy=LONG_SILENCE_POLICY)) as client:
        for number in range(6):
            AgentClient(client, f"n{number}").register(**FACTS)
        before = client.get("/v1/nodes/n5", headers=VIEWER).headers["etag"]
        assert get(client, "/v1/drift", op.DriftList) == op.DriftList(drifts=())
        AgentClient(client, "n5", incarnation=2).register(**FACTS | {"driver_version": "570.86"})
        page: op.DriftList = get(client, "/v1/drift?limit=1", op.DriftList)
        assert [(drift.node, drift.value, drift.usual) for drift in page.drifts] == [("n5", "driver", "575.57")]
        detail: op.NodeDetail = get(client, "/v1/nodes/n5", op.NodeDetail)
        assert (detail.drifts, detail.findings, detail.summary.state) == (page.drifts, (), "healthy")
        assert client.get("/v1/nodes/n5", headers=VIEWER).headers["etag"] != before
        assert 'drifted_nodes{value="driver"} 1.0' in client.get("/metrics", headers=VIEWER).text
