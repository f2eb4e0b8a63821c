"""Where this node's rendezvous store listens."""

from __future__ import annotations

import ipaddress
import socket

from everstep.errors import ConfigurationError

LOOPBACK = "127.0.0.1"


def rendezvous_host(local_addr: str | None, *, several_nodes: bool) -> str:
    """The address that goes to the other nodes' ranks: what was given, loopback for a job of one node, else the
    address this host's name resolves to, or (where that is loopback) the one that its default route leaves from.
    """
    if local_addr is not None:
        return local_addr
    if not several_nodes:
        return LOOPBACK
    for candidate in (_by_name(), _by_route()):
        if candidate is not None and not ipaddress.ip_address(candidate).is_loopback:
            return candidate
    return LOOPBACK


def listening_socket(host: str) -> socket.socket:
    """Listens on a free port of ``host`` alone. Raises ConfigurationError where that is not this machine's address."""
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family, backlog=4096)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {host}: {error}; name one of this machine's addresses with --local-addr"
        ) from error


def _by_name() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _by_route() -> str | None:
    """Connecting a datagram socket sends nothing; it only makes the kernel choose the way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address that belongs to nobody
        except OSError:
            return None
        return str(probe.getsockname()[0])
