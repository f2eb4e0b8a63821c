from __future__ import annotations

from pathlib import Path

import pytest

from everstep.host.pci_devices import other_gpus, pci_devices

GIB = 1 << 30


def add_device(
    sysfs: Path, address: str, vendor: str, kind: str, driver: str = "", memory_bytes: int | None = None
) -> Path:
    device = sysfs / "bus/pci/devices" / address
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    if driver:
        folder = sysfs / "bus/pci/drivers" / driver
        folder.mkdir(parents=True, exist_ok=True)
        (device / "driver").symlink_to(folder)
    if memory_bytes is not None:
        (device / "mem_info_vram_total").write_text(f"{memory_bytes}\n")
    return device


def gpus_below(sysfs: Path) -> dict[str, int]:
    return other_gpus(pci_devices(sysfs) or ())


def test_gpus_of_other_vendors_are_counted(tmp_path: Path) -> None:
    assert not any(gpus_below(tmp_path).values())
    add_device(tmp_path, "0000:05:00.0", "0x1002", "0x120000", "amdgpu")
    add_device(tmp_path, "0000:15:00.0", "0x1002", "0x038000", "amdgpu")
    add_device(tmp_path, "0000:25:00.0", "0x1002", "0x030000", "amdgpu", memory_bytes=48 * GIB)
    add_device(tmp_path, "0000:35:00.0", "0x8086", "0x038000", "xe")
    (add_device(tmp_path, "0000:35:00.1", "0x8086", "0x038000", "xe") / "physfn").mkdir()
    assert gpus_below(tmp_path) == {"AMD": 3, "Intel": 1}


@pytest.mark.parametrize(
    ("address", "vendor", "kind", "driver", "memory_bytes"),
    [
        ("0000:02:00.0", "0x1a03", "0x030000", "ast", None),
        ("0000:02:00.0", "0x102b", "0x030000", "mgag200", None),
        ("0000:00:02.0", "0x8086", "0x030000", "i915", None),
        ("0000:0d:00.0", "0x1002", "0x030000", "amdgpu", GIB // 2),
        ("0000:0d:00.0", "0x1002", "0x030000", "amdgpu", None),
        ("0000:05:00.0", "0x1002", "0x120000", "vfio-pci", None),
        ("0000:05:00.0", "0x1002", "0x120000", "", None),
        ("0000:1b:00.0", "0x10de", "0x030200", "nvidia", None),
        ("0000:3d:00.0", "0x8086", "0x0b4000", "qat", None),
    ],
    ids=["ASPEED", "Matrox", "Intel in CPU", "AMD in CPU", "AMD, old driver", "given away", "unused", "NVIDIA", "QAT"],
)
def test_other_graphics_are_no_unwatched_gpus(
    tmp_path: Path, address: str, vendor: str, kind: str, driver: str, memory_bytes: int | None
) -> None:
    add_device(tmp_path, address, vendor, kind, driver, memory_bytes)
    assert not any(gpus_below(tmp_path).values())
