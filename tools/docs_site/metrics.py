"""Page of metrics: every Prometheus family of the controller and of an agent, from the collectors themselves."""

from __future__ import annotations

import ast
import asyncio
import inspect
import tempfile
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import CollectorRegistry

from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.local import StatisticsAnswer
from everstep_agent import metrics as agent_metrics
from everstep_agent.drivers.gpu_samples import GpuNvlink, GpuSample, LinkSample
from everstep_agent.drivers.samples import HostSample, NvlinkFabricSample
from everstep_agent.sensors.sensor_messages import PollResult, SensorReport
from everstep_agent.vault import reporting, service
from everstep_controller.app.controller import Controller
from everstep_controller.auth.credentials import Keyring
from everstep_controller.config import ControllerSettings, StorageSettings
from everstep_controller.leadership.lease_candidate import ElectedState
from everstep_controller.remediation.remediator import DryRunRemediator
from everstep_controller.store.database import open_database
from everstep_controller.store.threads import DatabaseStore
from tools.docs_site.markdown import code, sentence, table

Family = tuple[str, str, str, tuple[str, ...]]
"""Name as Prometheus shows it, type, help and labels."""


def page() -> str:
    """Return the page."""
    agents = list(_of_agent())
    names = ("Name", "Type", "Labels", "Meaning")
    parts = [
        "# Metrics\n\nThe controller serves `GET /metrics` to a viewer's token; an agent serves it at its "
        "`metrics_listen` address. A fleet has thousands of nodes and ranks. The controller's families that name "
        "nodes, racks or ranks therefore show only those that matter most, and say how many. Recording rules and "
        "alerts are in `dashboards/prometheus/everstep.rules.yml`; [Monitoring](../how-to/monitoring.md) describes the "
        "dashboards.\n"
    ]
    for title, families in (
        ("Controller", asyncio.run(_of_controller())),
        ("Agent", [agent for agent in agents if agent[0].startswith("everstep_agent_")]),
        ("Vault", [agent for agent in agents if agent[0].startswith("everstep_vault_")]),
        ("GPUs", [agent for agent in agents if agent[0].startswith("everstep_gpu_")]),
        ("NVLinks", [agent for agent in agents if agent[0].startswith("everstep_nvlink_")]),
        ("Network ports", [agent for agent in agents if agent[0].startswith("everstep_port_")]),
        ("The machine", [agent for agent in agents if agent[0].startswith("everstep_host_")]),
        ("GPUs, under the names of dcgm-exporter", [agent for agent in agents if agent[0].startswith("DCGM_")]),
    ):
        parts.append(f"## {title}\n")
        if title.endswith("exporter"):
            parts.append("Shown where the agent's setting `dcgm_names` is on.\n")
        rows = [
            (code(name), kind, ", ".join(map(code, labels)), sentence(text)) for name, kind, text, labels in families
        ]
        parts.append(table(names, rows))
    return "\n".join(parts)


async def _of_controller() -> list[Family]:
    """Start a controller over an empty database and read its registry."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ControllerSettings(storage=StorageSettings(database=f"sqlite:///{Path(folder) / 'controller.db'}"))
        store = DatabaseStore(open_database(settings.storage.database))
        keyring = Keyring((b"a secret that is never asked for",))
        loaded = ElectedState(await store.take_over())
        controller = await Controller.lead(settings, keyring, store, loaded, SYSTEM_CLOCK, DryRunRemediator)
        try:
            return sorted(_families(controller.metrics.registry))
        finally:
            await controller.stop()


def _families(registry: CollectorRegistry) -> Iterator[Family]:
    """Yield the families of a registry with the labels that each declares, also where no series exists yet."""
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase):
            suffix = "_total" if collector._type == "counter" else ""
            yield collector._name + suffix, collector._type, collector._documentation, tuple(collector._labelnames)
        else:
            yield from _collected(collector.collect())


def _collected(families: Iterable[Any]) -> Iterator[Family]:
    for family in families:
        labels = tuple(getattr(family, "_labelnames", ())) or tuple(family.samples[0].labels if family.samples else ())
        yield family.name + ("_total" if family.type == "counter" else ""), family.type, family.documentation, labels


def _of_agent() -> Iterator[Family]:
    counters, refused = reporting.VaultCounters().read_all()
    vault = StatisticsAnswer(request=0, counters=counters, refused=refused, gauges=dict.fromkeys(_levels(), 0))
    gpu = _filled(GpuSample, nvlink=_filled(GpuNvlink, links=(_filled(LinkSample),)))
    poll = PollResult(is_full=True, gpus=(gpu,), fabric=_filled(NvlinkFabricSample), host=_filled(HostSample))
    report = SensorReport(poll=poll)
    numbers = _filled(agent_metrics.AgentMetrics, vault_statistics=vault, sensor_report=report)
    yield from _collected(agent_metrics.AgentCollector(lambda: numbers, dcgm_names=True).collect())


def _levels() -> list[str]:
    """Return the names of what a vault measures, from the dictionary that its service fills."""
    for node in ast.walk(ast.parse(inspect.getsource(service))):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "levels"
            and isinstance(node.value, ast.Dict)
        ):
            return [str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)]
    raise AssertionError("the vault's service fills no dictionary named levels")


def _filled(struct: type[Any], **given: Any) -> Any:
    """Return a struct in which every number is there, so that every family shows."""
    hints = typing.get_type_hints(struct)
    return struct(**{name: given[name] if name in given else _value(hints[name]) for name in struct.__struct_fields__})


def _value(hint: Any) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return _value(next(choice for choice in typing.get_args(hint) if choice is not type(None)))
    origin = typing.get_origin(hint) or hint
    if origin is tuple:
        return ()
    if origin in (dict, typing.Mapping) or getattr(origin, "__name__", "") == "Mapping":
        return {}
    if isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        return _filled(origin)
    return {bool: False, int: 1, float: 1.0}.get(origin, "")
