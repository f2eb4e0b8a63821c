"""Check ports, the interfaces that collectives use, and the address of this host's name."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable, Iterator, Mapping

from everstep.doctor.results import CheckResult, fail, ok, warn

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def bind_error(port: int) -> int:
    """Return the error number of listening at a port on all addresses; for port 0, on a free port of loopback. 0 if
    that works."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("" if port else "127.0.0.1", port))
            listener.listen()
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0


def check_ports(errors: Mapping[int, int]) -> Iterator[CheckResult]:
    """Check ports by the error number of listening there; port 0 is any free port of loopback."""
    for port, number in errors.items():
        name = "loopback" if port == 0 else f"port {port}"
        if number == 0:
            yield ok(name, "a process can listen there")
        elif port == 0:
            yield fail(
                name, f"no process can listen on 127.0.0.1 ({errno.errorcode[number]}): bring the interface lo up"
            )
        elif number == errno.EADDRINUSE:
            yield fail(
                name,
                f"another process listens there: find it (`ss -ltnp 'sport = :{port}'`) and end it, or take another "
                "port",
            )
        elif number == errno.EACCES:
            yield fail(name, "ports below 1024 are root's: take a larger one")
        else:
            yield fail(name, f"no process can listen there ({errno.errorcode.get(number, number)}): take another port")


def check_interfaces(environ: Mapping[str, str], interfaces: Iterable[str]) -> Iterator[CheckResult]:
    """Check that the interfaces that gloo and NCCL are told to use exist."""
    known = sorted(interfaces)
    for variable in INTERFACE_VARIABLES:
        value = environ.get(variable, "")
        if not value:
            yield ok(variable, "not set: the interface of the rank's address is used")
            continue
        wanted = [name for name in value.lstrip("^=").split(",") if name]
        if variable.startswith("GLOO"):
            missing = [name for name in value.split(",") if name not in known]
        elif value.startswith("^"):
            missing = [] if any(not _fits(name, wanted, value) for name in known) else wanted
        else:
            missing = [name for name in wanted if not any(_fits(interface, [name], value) for interface in known)]
        if missing:
            advice = f"name one of {', '.join(known)}, or unset the variable"
            yield fail(variable, f"{value!r} leaves no interface: {', '.join(missing)} is not usable here; {advice}")
        else:
            yield ok(variable, f"{value!r} names interfaces of this machine")


def _fits(name: str, wanted: list[str], value: str) -> bool:
    """Return whether an interface is named; NCCL takes names as prefixes, without an equals sign in front."""
    exact = value.lstrip("^").startswith("=")
    return any(name == pattern if exact else re.match(re.escape(pattern), name) for pattern in wanted)


def check_host_name(name: str, addresses: Iterable[str]) -> Iterator[CheckResult]:
    """Check that other nodes can reach this host by its name."""
    found = sorted(set(addresses))
    reachable = [address for address in found if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    if reachable:
        yield ok("host name", f"{name} is {', '.join(reachable)}")
    else:
        where = f"resolves to {', '.join(found)} only" if found else "does not resolve"
        yield warn(
            "host name",
            f"{name} {where}: the address of the default route is used for other nodes; give --local-addr if that is "
            "the wrong network",
        )
