"""A controller holds a million GPUs of a few models: equal words of many nodes are one string in memory."""

from __future__ import annotations

import msgspec
import pytest

from everstep.wire.v1.agent import Gpu, Host, Register

GPU = Gpu(
    index=0,
    uuid="u",
    name="H100",
    pci_bus_id="0000:1b:00",
    memory_bytes=1,
    part_number="692-2G520",
    vbios="96",
    inforom="G5",
)
HOST = Host(vendor="NVIDIA", product="DGXH100", serial="1", chassis_serial="2", kernel="6.8.0-40-generic")


@pytest.mark.parametrize(
    ("words", "shared"),
    [
        (GPU, ("name", "pci_bus_id", "part_number", "vbios", "inforom")),
        (HOST, ("vendor", "product", "kernel")),
    ],
)
def test_equal_strings_of_registrations_are_interned(words: Gpu | Host, shared: tuple[str, ...]) -> None:
    body = msgspec.json.encode(words)
    one, other = (msgspec.json.decode(body, type=type(words)) for _ in range(2))
    assert one == other == words
    assert all(getattr(one, name) is getattr(other, name) for name in shared)


def test_unset_fields_are_omitted_from_messages() -> None:
    silent_node = Register(protocols=(1,), node="n", incarnation=1, agent_version="1", vault="v:1")
    assert b"host" not in msgspec.json.encode(silent_node)
    silent = Gpu(index=0, uuid="u", name="H100", pci_bus_id="0", memory_bytes=1)
    assert set(msgspec.to_builtins(silent)) == {"index", "uuid", "name", "pci_bus_id", "memory_bytes"}
