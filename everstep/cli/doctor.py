"""``everstep doctor``: check a machine before it trains."""

from __future__ import annotations

import os
import re
import resource
import socket
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

import everstep.native as native
from everstep.cli.context import ConnectionOptions, Json, choose, get_function, reporting_errors, show, state_dir
from everstep.cli.tables import table
from everstep.client import Client
from everstep.doctor import accelerators, access, limits, memory, network
from everstep.doctor import sensors as agent_sensors
from everstep.doctor.results import Check, CheckResult, Status, ok, run_checks
from everstep.errors import ConfigurationError, EverstepError
from everstep.host.pci_devices import other_gpus, pci_devices
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.local import DEFAULT_AGENT_SOCKET
from everstep.wire.v1.node_status import NODE_SOCKET

SYSFS = Path("/sys")
INFINIBAND = Path("/sys/class/infiniband")
INIT_STATUS = Path("/proc/1/stat")
STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return ``500000``, ``12GB`` or ``1.5T`` in bytes; units are powers of 1024. Raises ConfigurationError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ConfigurationError(f"{text!r} is no size: use a number of bytes, or 800M, 12G or 1.5T")
    return int(float(found[1]) * 1024 ** " KMGT".index(found[2].upper() or " "))


def doctor(
    context: typer.Context,
    model_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Parameters and optimizer state, as in 12G.")] = "",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes of the job.")] = 1,
    ranks: Annotated[int, typer.Option(min=0, help="Number of ranks on this node. Default: one per GPU.")] = 0,
    port: Annotated[list[int] | None, typer.Option(help="Port that must be free, such as --rdzv-endpoint's.")] = None,
    sensors: Annotated[
        bool, typer.Option("--sensors", help="Check only what the agent's sensors read here, and why not more.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine before it trains: memory, network, limits, torch, GPUs, and access to the controller.

    The exit status is 1 if a check failed.
    """
    if sensors:
        _report({"sensors": agent_sensors.check_sensors}, as_json)
        return
    given: ConnectionOptions = context.obj
    with reporting_errors():
        state_bytes = parse_size(model_bytes) if model_bytes else None
    driver = cache(accelerators.read_driver)
    checks: dict[str, Check] = {
        "memory": lambda: memory.check_memory(memory.read_memory(), state_bytes, nodes),
        "ports": lambda: network.check_ports({number: network.bind_error(number) for number in (0, *(port or ()))}),
        "interfaces": lambda: network.check_interfaces(os.environ, [name for _, name in socket.if_nameindex()]),
        "host name": partial(_host_name, nodes),
        "limits": _limits,
        "threads": lambda: limits.check_threads(
            os.environ, len(os.sched_getaffinity(0)), ranks or driver().devices or 1
        ),
        "/proc": lambda: limits.check_proc(INIT_STATUS.exists()),
        "state directory": lambda: limits.check_state_dir(state_dir(os.environ)),
        "native library": _native,
        "agent": _agent,
        "GPU driver": lambda: accelerators.check_driver(driver()),
        "other GPUs": lambda: accelerators.check_other_gpus(other_gpus(pci_devices(SYSFS) or ())),
        "torch": lambda: accelerators.check_torch(accelerators.read_torch(), driver()),
        "controller": partial(_controller, given),
    }
    _report(checks, as_json)


def _report(checks: dict[str, Check], as_json: bool) -> None:
    """Run the checks and print their results. Exits with 1 if one failed."""
    report = run_checks(checks)
    view = table("check", "", "what")
    for result in report.results:
        view.add_row(result.check, Text(str(result.status), style=STYLES[result.status]), result.sentence)
    show(report, as_json, view)
    if not report.ok:
        raise typer.Exit(1)


def _host_name(nodes: int) -> Iterator[CheckResult]:
    name = socket.gethostname()
    if nodes == 1:
        return
    try:
        addresses = [str(found[4][0]) for found in socket.getaddrinfo(name, None)]
    except OSError:
        addresses = []
    yield from network.check_host_name(name, addresses)


def _limits() -> Iterator[CheckResult]:
    files, locked = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    return limits.check_limits(files, locked, INFINIBAND.is_dir() and any(INFINIBAND.iterdir()))


def _native() -> Iterator[CheckResult]:
    disabled = os.environ.get(native.ENV_VARIABLE) == "0"
    return limits.check_native(native.LIBRARY, disabled, native.copy_hash is not None)


def _agent() -> Iterator[CheckResult]:
    named = os.environ.get("EVERSTEP_LAUNCH_AGENT_SOCKET")
    path = Path(named or DEFAULT_AGENT_SOCKET)
    if not path.exists() and path.with_name(NODE_SOCKET).exists():
        yield ok("agent", f"the one in {path.parent} runs standalone: everstep-launch brings a controller of its own")
        return
    exists = bool(named) or path.exists()  # the launcher waits at a socket that was named
    yield from limits.check_agent(path, exists, limits.connect_error(path) if exists else "")


def _controller(given: ConnectionOptions) -> Iterator[CheckResult]:
    """Check the controller that the commands would ask, if one is configured or a run is here."""
    now = SYSTEM_CLOCK.wall()
    yield from access.check_tls(given.ca_file, given.client_certificate, given.client_key, now)
    if given.token_file:
        yield from access.check_secret_file("token file", given.token_file)
    if not given.controller and not given.token_file and choose(state_dir(os.environ), given.run) is None:
        yield ok("controller", "none is configured: a run of everstep-launch makes its own")
        return
    resolved = given.resolved(os.environ)
    try:
        client = Client(resolved.controller, resolved.token(), tls=resolved.tls())
    except EverstepError as error:
        yield CheckResult(check="controller", status=Status.FAIL, sentence=str(error))
        return
    node = "local" if resolved.token_file != given.token_file else ""  # a private run's
    with client:
        facts = access.read_access(get_function(client), resolved.controller, SYSTEM_CLOCK, node)
    yield from access.check_access(facts, now)
