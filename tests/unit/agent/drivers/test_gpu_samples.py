"""Values of samples by the names that rules, metrics and profiles give them."""

from __future__ import annotations

import msgspec
import pytest

from everstep_agent.drivers.gpu_samples import GpuSample
from everstep_agent.drivers.samples import PortCounterGrowth, SamplePart, flat_fields, value_hints, value_reader
from tests.support.agents.sensors import gpu


def value_names(sample: msgspec.Struct) -> list[str]:
    """Return the names of all values of a sample and its parts, one for each place."""
    fields = {name: getattr(sample, name) for name in sample.__struct_fields__}
    parts = [value for value in fields.values() if isinstance(value, SamplePart)]
    own = [name for name, value in fields.items() if not isinstance(value, SamplePart)]
    own += [name for name, member in vars(type(sample)).items() if isinstance(member, property)]
    return own + [name for part in parts for name in value_names(part)]


@pytest.mark.parametrize("sample", [gpu(), PortCounterGrowth()])
def test_no_two_parts_share_the_name_of_a_value(sample: msgspec.Struct) -> None:
    assert sorted(value_names(sample)) == sorted(value_hints(type(sample)))


def test_value_is_read_by_its_name_alone() -> None:
    sample = gpu(remap_pending=1, memory_temperature_c=90, processes=2, pci_bus_id="0000:43:00")
    names = ("remap_pending", "memory_temperature_margin_c", "processes", "pci_bus_id", "is_lost")
    assert [sample.value(name) for name in names] == [1, 5, 2, "0000:43:00", 0]
    assert (flat_fields(sample)["remap_pending"], flat_fields(sample)["processes"]) == (1, 2)


@pytest.mark.parametrize("name", ["remap_pendin", "memory_errors", "memory_errors.remap_pending"])
def test_unknown_name_has_no_reader(name: str) -> None:
    with pytest.raises(KeyError):
        value_reader(GpuSample, name)
