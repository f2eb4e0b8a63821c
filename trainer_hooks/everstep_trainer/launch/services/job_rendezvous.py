"""Let the launchers of one job meet at an endpoint, where no agent or controller stands (decision 0070).

The first node's launcher runs the job's private controller at the endpoint; every node's launcher runs a private agent
that connects to it. All of them hold the same job secret. From it they derive the secret that mints agents' tokens, so
that the controller knows its agents, and the key of an authority that signs the controller's certificate, so that
agents know the controller. Nothing has to be enrolled first, and the secret itself never crosses the network.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import socket
import ssl
import stat
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from everstep.bearer_tokens import TokenRole, mint
from everstep.clock import Clock
from everstep.errors import ConfigurationError, Unavailable
from everstep.host.agent_places import local_node_name
from everstep.host.private_files import make_private_directories, write_private
from everstep.ids import check_name
from everstep_trainer.launch.options import LaunchOptions, RendezvousSettings

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29400  # torchrun's, of an endpoint without one
MIN_SECRET_CHARACTERS = 32
MAX_SECRET_BYTES = 4096
HOW_TO_MAKE_ONE = "`(umask 077; openssl rand -hex 32 > FILE)`, the same file on every node, and --job-secret-file FILE"
AUTHORITY_FILE = "authority.pem"
CERTIFICATE_FILE = "controller.pem"
KEY_FILE = "controller.key"
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # request for an interface's IPv4 address (netdevice(7))
_CERTIFICATE_DAYS = 3650  # longer than any job: the certificates end with the job's directory


# ---- endpoint


class Endpoint(msgspec.Struct, frozen=True):
    """Where the job's controller listens, as all its launchers name it."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Return the endpoint in ``host``, ``host:port`` or ``[IPv6]:port``. Raises ConfigurationError."""
        host, colon, port = text.rpartition(":")
        if not colon or text.endswith("]"):
            host, port = text, str(DEFAULT_PORT)
        host = host.removeprefix("[").removesuffix("]")
        if not re.fullmatch(r"[A-Za-z0-9._:-]+", host) or not port.isdigit() or not 0 < int(port) <= 65535:
            message = f"--rdzv-endpoint {text}: expected HOST:PORT of the first node, such as node1:29400"
            raise ConfigurationError(message)
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if the endpoint's own words name this machine alone; a host's name may resolve to loopback there."""
        return self.host == "localhost" or _is_loopback(self.host)

    def resolve(self) -> list[str]:
        """Return the IP addresses of the host. Raises Unavailable."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Unavailable(f"--rdzv-endpoint: {self.host} has no address here: {error}") from error
        return list(dict.fromkeys(str(info[4][0]) for info in found))


def _ip_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _ip_address(host)
    return address is not None and address.is_loopback


def claim_endpoint(endpoint: Endpoint, node_rank: int | None) -> socket.socket | None:
    """Return a claim to be the first node, to be held while the launcher runs; None for another node.

    With ``node_rank`` that is node 0. Otherwise it is the machine that has the endpoint's address, and its first
    launcher where several run there. Raises ConfigurationError if node 0 lacks the address, Unavailable if the host is
    unknown.
    """
    if node_rank:
        return None
    if not any(map(_is_own_address, endpoint.resolve())):
        if node_rank is None:
            return None
        raise ConfigurationError(
            f"--rdzv-endpoint {endpoint} is no address of this machine, and --node-rank 0 says that this is the first "
            "node: start the launcher with --node-rank 0 on the endpoint's host, or name this host"
        )
    claim = _claim(f"rendezvous/{endpoint}")
    if claim is None and node_rank is not None:
        raise ConfigurationError(
            f"another launcher on this machine is the first node at {endpoint}: end it, or give another port"
        )
    return claim


def claim_job(agent_socket: str, job: str) -> socket.socket:
    """Return a claim to a job's ranks on this node, to be held while the launcher runs.

    A second launcher would take each rank's place at the agent, and the first one's ranks would take it back. Raises
    ConfigurationError if another launcher has the claim.
    """
    # hashed, since the name of a claim has at most 107 bytes
    name = hashlib.sha256(f"{Path(agent_socket).absolute()}\0{job}".encode(errors="surrogateescape")).hexdigest()
    if (claim := _claim(f"launcher/{name}")) is None:
        raise ConfigurationError(
            f"another launcher of job {job} runs on this node: wait for its end or end it, or give another --job"
        )
    return claim


def _claim(name: str) -> socket.socket | None:
    """Return a socket that holds a name until it is closed; None if another process has it.

    The name is in the abstract namespace, which ends with the process and is one per network namespace.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0everstep/{name}")
    except OSError:
        claim.close()
        return None
    return claim


def _is_own_address(address: str) -> bool:
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


# ---- address of this node for the ranks and vaults of others


def rendezvous_host(local_addr: str | None, *, several_nodes: bool) -> str:
    """Return the address that the ranks of other nodes use.

    This is the given address; loopback for a job of one node; else the address of this host's name, or of the default
    route if that is loopback.
    """
    if local_addr is not None or not several_nodes:
        return local_addr or LOOPBACK
    # RFC 5737 and RFC 3849: addresses that no machine has
    routes = (_source_address(host, 9) for host in ("192.0.2.1", "2001:db8::1"))
    for candidate in (_by_name(socket.AF_INET), *routes, _by_name(socket.AF_INET6)):
        if candidate is not None and not _is_loopback(candidate):
            return candidate
    log.warning(
        "ranks meet at %s, since this host has no other address by its name or its routes: give the address that the "
        "job's other nodes reach with --local-addr",
        LOOPBACK,
    )
    return LOOPBACK


def _own_address(endpoint: Endpoint, addresses: Iterable[str], *, is_first: bool) -> str | None:
    """Return this node's address towards the other nodes; None if only the caller's own search can tell."""
    if endpoint.is_loopback:
        return LOOPBACK
    reachable = [address for address in addresses if not _is_loopback(address)]
    if not reachable:
        return None
    return reachable[0] if is_first else _source_address(reachable[0], endpoint.port)


def _by_name(family: socket.AddressFamily) -> str | None:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM)
    except OSError:
        return None
    return str(found[0][4][0])


def _source_address(host: str, port: int) -> str | None:
    """Return this node's address on the route to a host: connecting a datagram socket sends nothing."""
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface whose IPv4 address this is; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address
                if socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


def collective_environment(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that bind gloo to this node's address.

    Without them gloo takes the address of the host's name, which many hosts files give as loopback.
    """
    interface = None if _is_loopback(address) or GLOO_INTERFACE_VARIABLE in environ else interface_of(address)
    return {} if interface is None else {GLOO_INTERFACE_VARIABLE: interface}


# ---- job secret


def read_job_secret(path: Path) -> bytes:
    """Return the secret in a file. Raises ConfigurationError if it is missing, too short or readable by others."""
    try:
        with path.open("rb") as file:
            mode, secret = stat.S_IMODE(os.fstat(file.fileno()).st_mode), file.read(MAX_SECRET_BYTES).strip()
    except OSError as error:
        message = f"cannot read the job secret {path}: {error.strerror}; make one: {HOW_TO_MAKE_ONE}"
        raise ConfigurationError(message) from error
    if mode & 0o077:
        raise ConfigurationError(
            f"the job secret {path} can be read by other users (mode {mode:04o}): run `chmod 600 {path}`, and make a "
            "new secret if another user may have read it"
        )
    if len(secret) < MIN_SECRET_CHARACTERS:
        raise ConfigurationError(
            f"the job secret in {path} has {len(secret)} characters, and needs {MIN_SECRET_CHARACTERS}: make another "
            f"with {HOW_TO_MAKE_ONE}"
        )
    return secret


def _machine_secret(state_dir: Path) -> bytes:
    """Return the secret of this user's loopback rendezvous, which is made at its first use."""
    path = state_dir / "loopback.secret"
    try:
        make_private_directories(state_dir)
        if not path.exists():
            draft = state_dir / f".loopback.secret.{secrets.token_hex(4)}"
            write_private(draft, secrets.token_hex(32).encode())
            with contextlib.suppress(FileExistsError):
                path.hardlink_to(draft)  # the first of several launchers that start at once
            draft.unlink()
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error}; give another --state-dir") from error
    return read_job_secret(path)


def derive(secret: bytes, job: str, purpose: str, nbytes: int = 32) -> bytes:
    """Return a key for one purpose in one job: HKDF-SHA256 (RFC 5869)."""
    pseudorandom = hmac.new(b"everstep/1 job rendezvous", secret, hashlib.sha256).digest()
    key, block, index = b"", b"", 1
    while len(key) < nbytes:
        info = f"{purpose}\0{job}".encode()
        block = hmac.new(pseudorandom, block + info + bytes([index]), hashlib.sha256).digest()
        key, index = key + block, index + 1
    return key[:nbytes]


# ---- certificates, made by the openssl program

_GROUP_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of P-256
_KEY_BEFORE, _KEY_AFTER = bytes.fromhex("30310201010420"), bytes.fromhex("a00a06082a8648ce3d030107")
"""DER of an ECPrivateKey (RFC 5915) on P-256 around its 32 bytes."""
_OPENSSL_CONFIGURATION = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = everstep job
[authority]
basicConstraints = critical, CA:TRUE
keyUsage = critical, keyCertSign
subjectKeyIdentifier = hash
[controller]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid
subjectAltName = {names}
"""


def authority_key(seed: bytes) -> str:
    """Return the PEM of the P-256 private key that 48 bytes determine."""
    number = int.from_bytes(seed, "big") % (_GROUP_ORDER - 1) + 1
    der = _KEY_BEFORE + number.to_bytes(32, "big") + _KEY_AFTER
    return f"-----BEGIN EC PRIVATE KEY-----\n{base64.encodebytes(der).decode()}-----END EC PRIVATE KEY-----\n"


def write_certificates(directory: Path, seed: bytes, hosts: Iterable[str] | None) -> None:
    """Write the authority's certificate, and for the first node (``hosts``) also the controller's and its key.

    Each node makes a certificate of its own for the authority. They have the same name and key, so that each of them
    verifies the controller. The authority's key is removed at once.
    """
    configuration, key = directory / "openssl.cnf", directory / "authority.key"
    names = ",".join(f"{'IP' if _ip_address(host) else 'DNS'}:{host}" for host in hosts or ("localhost",))
    configuration.write_text(_OPENSSL_CONFIGURATION.format(names=names))
    write_private(key, authority_key(seed).encode())
    authority, request = directory / AUTHORITY_FILE, directory / "controller.csr"
    days = ("-days", str(_CERTIFICATE_DAYS))
    new = ("req", "-new", "-config", str(configuration))
    try:
        _openssl(*new, "-x509", "-extensions", "authority", "-key", str(key), *days, "-out", str(authority))
        if hosts is not None:
            curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
            own_key = directory / KEY_FILE
            write_private(own_key, b"")
            _openssl(*new, *curve, "-subj", "/CN=everstep controller", "-keyout", str(own_key), "-out", str(request))
            signer = ("-CA", str(authority), "-CAkey", str(key), "-set_serial", f"0x{secrets.token_hex(8)}")
            extensions = ("-extfile", str(configuration), "-extensions", "controller")
            signed = directory / CERTIFICATE_FILE
            _openssl("x509", "-req", "-in", str(request), *signer, *days, *extensions, "-out", str(signed))
    finally:
        for file in (key, request, configuration):
            file.unlink(missing_ok=True)


def _openssl(*arguments: str) -> None:
    try:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        raise ConfigurationError(
            "the openssl program, which makes the job's certificates, is not on the PATH: install it (package openssl)"
        ) from None
    except subprocess.TimeoutExpired:
        raise Unavailable("openssl did not make a certificate within 60 s") from None
    except subprocess.CalledProcessError as error:
        detail = error.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise ConfigurationError(f"openssl cannot make the job's certificates: {detail[0]}") from None


# ---- the services' network


class ServiceNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """How the private services of one launcher are reached, and what proves them to each other."""

    node: str = "local"
    address: str = LOOPBACK  # this node's own, for the vaults and ranks of other nodes
    controller: str | None = None  # URL of the one on the first node; None if it is this launcher's own, without TLS
    listen: str | None = f"{LOOPBACK}:0"  # where this launcher's controller listens; None if another node has it
    preset: Literal["lab", "production"] = "lab"
    secret: str = msgspec.field(default_factory=lambda: secrets.token_hex(32))  # mints tokens
    authority_seed: bytes | None = None  # of the certificate authority; None without TLS
    names: tuple[str, ...] = ()  # by which other nodes may know the controller: host names and addresses

    def __repr__(self) -> str:
        return f"ServiceNetwork(node={self.node!r}, controller={self.controller!r}, listen={self.listen!r})"

    def write_credentials(self, run_dir: Path) -> None:
        """Write the secret, tokens and certificates. Raises ConfigurationError, Unavailable, OSError."""
        secret = self.secret.encode()
        write_private(run_dir / "secret", secret)
        write_private(run_dir / "agent.token", mint(secret, TokenRole.AGENT, self.node).encode())
        write_private(run_dir / "operator.token", mint(secret, TokenRole.OPERATOR, "launcher").encode())
        if self.authority_seed is not None:
            write_certificates(run_dir, self.authority_seed, self.names if self.listen is not None else None)

    def tls(self, run_dir: Path) -> ssl.SSLContext | None:
        """Return the context to connect to the controller with; None without TLS."""
        if self.authority_seed is None:
            return None
        return ssl.create_default_context(cafile=str(run_dir / AUTHORITY_FILE))


def meet(
    options: LaunchOptions, state_dir: Path, stack: contextlib.ExitStack | contextlib.AsyncExitStack
) -> ServiceNetwork:
    """Return the network of a launcher with ``--rdzv-endpoint``; ``stack`` holds its claim to be the first node.

    Raises ConfigurationError if the endpoint, the secret or the node's name cannot be used, Unavailable if the
    endpoint's host is unknown.
    """
    settings = options.rendezvous
    assert settings.rdzv_endpoint is not None
    endpoint = Endpoint.parse(settings.rdzv_endpoint)
    if settings.job_secret_file is not None:
        secret = read_job_secret(Path(settings.job_secret_file))
    elif endpoint.is_loopback:
        secret = _machine_secret(state_dir)
    else:
        raise ConfigurationError(
            f"launchers that meet at {endpoint} must share a secret: make one with {HOW_TO_MAKE_ONE}"
        )
    claim = claim_endpoint(endpoint, settings.node_rank)
    if claim is not None:
        stack.enter_context(claim)
    addresses = endpoint.resolve()
    found = settings.local_addr or _own_address(endpoint, addresses, is_first=claim is not None)
    address = found or rendezvous_host(None, several_nodes=True)
    listen = None
    if claim is not None:
        own = next(filter(_is_own_address, addresses), LOOPBACK)
        # A host's own name may stand for loopback in its hosts file: then listen on all interfaces.
        is_reachable = endpoint.is_loopback or not _is_loopback(own)
        listen = str(Endpoint(own if is_reachable else "0.0.0.0", endpoint.port))  # noqa: S104
    names = (endpoint.host, socket.gethostname(), socket.getfqdn(), address, *addresses)
    return ServiceNetwork(
        node=_node_name(settings, endpoint, is_first=claim is not None),
        address=address,
        controller=f"https://{endpoint}",
        listen=listen,
        preset=_preset(endpoint),
        secret=derive(secret, options.job, "tokens").hex(),
        authority_seed=derive(secret, options.job, "authority", 48),
        names=tuple(dict.fromkeys(names)),
    )


def controller_network(secret: bytes, job: str, endpoint: Endpoint) -> ServiceNetwork:
    """Return the network of a job's controller that runs at ``endpoint`` without a launcher beside it."""
    return ServiceNetwork(
        address=endpoint.host,
        controller=f"https://{endpoint}",
        listen=str(endpoint),
        preset=_preset(endpoint),
        secret=derive(secret, job, "tokens").hex(),
        authority_seed=derive(secret, job, "authority", 48),
        names=(endpoint.host,),
    )


def _preset(endpoint: Endpoint) -> Literal["lab", "production"]:
    return "lab" if endpoint.is_loopback else "production"


def _node_name(settings: RendezvousSettings, endpoint: Endpoint, *, is_first: bool) -> str:
    """Return the given name, or the host's; launchers that meet on loopback share one host, and get a number."""
    name = settings.node or local_node_name()
    if not settings.node and endpoint.is_loopback:
        number = settings.node_rank if settings.node_rank is not None else 0 if is_first else 1
        name = f"{name}-{number}"
    try:
        return check_name(name, "node")
    except ValueError as error:
        raise ConfigurationError(f"--node: {error}") from None


# ---- watch over the first node

JOIN_TIMEOUT_S = 600.0  # longest wait for the first node's first answer; torchrun waits as long
CERTIFICATE_TIMEOUT_S = 30.0
"""Seconds for which a controller with a foreign certificate may answer, such as an earlier job's that is ending."""
FIRST_PROBE_INTERVAL_S = 0.2  # until the first answer, so that it comes before the job begins
PROBE_INTERVAL_S = 2.0
PROBE_TIMEOUT_S = 5.0


async def watch_first_node(url: str, tls: ssl.SSLContext | None, loss_timeout_s: float, clock: Clock) -> str:
    """Ask the controller at ``url`` whether it is there until it is not; then return a sentence that says so.

    ``loss_timeout_s``: seconds without an answer, after the first one, that count as its loss.
    """
    endpoint = Endpoint.parse(url.partition("://")[2])
    answered_at: float | None = None
    started_at, foreign_since = clock.monotonic(), None
    while True:
        problem = await _probe(endpoint, tls)
        now = clock.monotonic()
        foreign_since = (foreign_since or now) if isinstance(problem, ssl.SSLCertVerificationError) else None
        if problem is None:
            answered_at = now
        elif foreign_since is not None and now - foreign_since >= CERTIFICATE_TIMEOUT_S:
            return (
                f"the controller at {endpoint} does not know the secret of this job: give all launchers the same "
                "--job-secret-file, --job and --rdzv-endpoint, or choose a port that no other job uses"
            )
        elif answered_at is None and now - started_at >= JOIN_TIMEOUT_S:
            return (
                f"the first node did not answer at {endpoint} within {JOIN_TIMEOUT_S:g} s ({problem}): start the "
                "launcher there, or correct --rdzv-endpoint"
            )
        elif answered_at is not None and now - answered_at >= loss_timeout_s:
            return (
                f"the first node ({endpoint}), where the job's controller ran, has not answered for "
                f"{loss_timeout_s:g} s: the job ends; start all its launchers again"
            )
        await asyncio.sleep(FIRST_PROBE_INTERVAL_S if answered_at is None else PROBE_INTERVAL_S)


async def _probe(endpoint: Endpoint, tls: ssl.SSLContext | None) -> Exception | None:
    """Return None if a controller answers, else the reason."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=tls)
            try:
                writer.write(f"GET /readyz HTTP/1.1\r\nHost: {endpoint}\r\nConnection: close\r\n\r\n".encode())
                return None if await reader.readline() else Unavailable("it closed the connection")
            finally:
                writer.close()
    except TimeoutError:
        return Unavailable(f"no answer within {PROBE_TIMEOUT_S:g} s")
    except OSError as error:
        return error
