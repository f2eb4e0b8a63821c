"""Finds and reads scenarios; runs in the supervisor, so that a typo is told at once and the child stays small."""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash

from agent.virtual.scenario import DGX_BUS_IDS, Scenario, ScenarioFile, VirtualGpu, VirtualHost, VirtualPort
from everstep.errors import ConfigurationError
from everstep.strict_toml import load_toml

DEFAULT_GPUS = 8
MOST_GPUS = 64


def load_scenario(which: str, node: str) -> Scenario:
    """The scenario that ``which`` names: a TOML file, ``default`` (8 GPUs) or ``default:N``.

    ``node`` makes serial numbers and UUIDs differ from machine to machine. Raises ConfigurationError.
    """
    if which == "default" or which.startswith("default:"):
        return _build(ScenarioFile(name="default", gpus=_default_count(which), port=_default_ports()), node)
    return _build(load_toml(Path(which), ScenarioFile, (ScenarioFile, VirtualGpu, VirtualHost, VirtualPort)), node)


def _default_count(which: str) -> int:
    _, colon, count = which.partition(":")
    if not colon:
        return DEFAULT_GPUS
    if not count.isdigit() or int(count) > MOST_GPUS:
        raise ConfigurationError(f"{which!r}: say default, default:N with N up to {MOST_GPUS}, or a scenario file")
    return int(count)


def _default_ports() -> dict[str, VirtualPort]:
    return {f"mlx5_{index}": VirtualPort() for index in range(2)}


def _build(file: ScenarioFile, node: str) -> Scenario:
    count = len(file.gpu) if file.gpus is None else file.gpus
    if count < len(file.gpu):
        raise ConfigurationError(f"scenario {file.name!r}: gpus = {count}, yet {len(file.gpu)} [[gpu]] are described")
    described = [*file.gpu, *(VirtualGpu() for _ in range(count - len(file.gpu)))]
    return Scenario(
        name=file.name,
        boot_id=file.boot_id,
        driver_version=file.driver_version,
        nvml_error=file.nvml_error,
        gpu=tuple(_named(gpu, index, node) for index, gpu in enumerate(described)),
        port={name: _addressed(port, name, node) for name, port in file.port.items()},
        host=_numbered(file.host, node),
    )


def _addressed(port: VirtualPort, name: str, node: str) -> VirtualPort:
    digest = xxhash.xxh3_64_hexdigest(f"{node}/{name}".encode())
    guid = ":".join(digest[i : i + 4] for i in range(0, 16, 4))
    return msgspec.structs.replace(port, address=port.address or guid)


def _numbered(host: VirtualHost, node: str) -> VirtualHost:
    number = int(xxhash.xxh3_64_hexdigest(node.encode())[:10], 16)
    return msgspec.structs.replace(
        host, serial=host.serial or str(number), chassis_serial=host.chassis_serial or f"C{number}"
    )


def _named(gpu: VirtualGpu, index: int, node: str) -> VirtualGpu:
    digest = xxhash.xxh3_128_hexdigest(f"{node}/{index}".encode())
    uuid = f"GPU-{digest[:8]}-{digest[8:12]}-{digest[12:16]}-{digest[16:20]}-{digest[20:32]}"
    bus = DGX_BUS_IDS[index] if index < len(DGX_BUS_IDS) else f"{index:02x}:00"
    return msgspec.structs.replace(
        gpu,
        uuid=gpu.uuid or uuid,
        pci_bus_id=gpu.pci_bus_id or f"0000:{bus}",
        serial=gpu.serial or str(int(digest[:10], 16)),
    )
