"""Launchers without agents find each other, and prove that they know the job's secret."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.peers.run import free_port
from everstep.bearer_tokens import TokenRole, verify_with_secret
from everstep.clock import ManualClock
from everstep.errors import ConfigurationError, Unavailable
from everstep.system_clock import SYSTEM_CLOCK
from everstep_trainer.launch.options import LaunchOptions, RendezvousSettings
from everstep_trainer.launch.services import job_rendezvous
from everstep_trainer.launch.services.job_rendezvous import (
    AUTHORITY_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    Endpoint,
    ServiceNetwork,
    claim_endpoint,
    claim_job,
    collective_environment,
    derive,
    meet,
    read_job_secret,
    watch_first_node,
)

SECRET = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


def options(endpoint: str, **given: Any) -> LaunchOptions:
    job, rendezvous = given.pop("job", "j"), RendezvousSettings(rdzv_endpoint=endpoint, **given)
    return LaunchOptions(script="train.py", job=job, nnodes=2, rendezvous=rendezvous)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("node1:1234", "node1", 1234), ("node1", "node1", 29400), ("[::1]:5", "::1", 5), ("[fe80::1]", "fe80::1", 29400)],
)
def test_endpoint_is_read_as_torchrun_reads_it(text: str, host: str, port: int) -> None:
    assert Endpoint.parse(text) == Endpoint(host, port)


@pytest.mark.parametrize("text", ["", ":1", "node1:0", "node1:http", "node1:70000", "a,b:1"])
def test_malformed_endpoint_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"such as node1:29400"):
        Endpoint.parse(text)


def test_first_launcher_on_the_endpoints_machine_is_first(stack: contextlib.ExitStack) -> None:
    endpoint = Endpoint("127.0.0.1", free_port())
    claim = claim_endpoint(endpoint, None)
    assert claim is not None
    with claim:
        assert claim_endpoint(endpoint, None) is None
        with pytest.raises(ConfigurationError, match="another launcher on this machine is the first node"):
            claim_endpoint(endpoint, 0)
    again = claim_endpoint(endpoint, 0)
    assert again is not None
    again.close()


def test_node_rank_decides_the_first_node() -> None:
    assert claim_endpoint(Endpoint("127.0.0.1", free_port()), 1) is None
    assert claim_endpoint(Endpoint("192.0.2.7", 1), None) is None
    with pytest.raises(ConfigurationError, match="no address of this machine, and --node-rank 0"):
        claim_endpoint(Endpoint("192.0.2.7", 1), 0)


def test_unknown_host_is_named() -> None:
    with pytest.raises(Unavailable, match=r"no-such-host\.invalid has no address"):
        Endpoint("no-such-host.invalid", 1).resolve()


def test_missing_secret_is_refused_with_the_command(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    with pytest.raises(ConfigurationError, match=r"must share a secret: make one with .*openssl rand -hex 32"):
        meet(options("192.0.2.7:29400"), tmp_path, stack)


def test_unsafe_secret_files_are_refused(secret_file: Path) -> None:
    assert read_job_secret(secret_file) == SECRET.encode()
    secret_file.chmod(0o640)
    with pytest.raises(ConfigurationError, match="can be read by other users"):
        read_job_secret(secret_file)
    secret_file.chmod(0o600)
    secret_file.write_text("short")
    with pytest.raises(ConfigurationError, match="has 5 characters, and needs 32") as refused:
        read_job_secret(secret_file)
    assert "short" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="cannot read the job secret"):
        read_job_secret(secret_file.with_name("missing"))


def test_all_nodes_derive_one_trust_from_one_secret(
    tmp_path: Path, secret_file: Path, stack: contextlib.ExitStack
) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    given = {"job_secret_file": str(secret_file)}
    first, second = (meet(options(endpoint, **given), tmp_path, stack) for _ in range(2))
    assert (first.listen, second.listen) == (endpoint, None)
    assert first.controller == second.controller == f"https://{endpoint}"
    assert [member.node for member in (first, second)] == [
        f"{socket.gethostname().partition('.')[0]}-{n}" for n in (0, 1)
    ]
    assert first.secret == second.secret != SECRET
    assert meet(options(endpoint, job="other", **given), tmp_path, stack).secret != first.secret
    assert first.secret not in repr(first)


def test_loopback_launchers_of_a_user_share_a_made_secret(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    endpoint = f"localhost:{free_port()}"
    first, second = (meet(options(endpoint, node=name), tmp_path / "state", stack) for name in ("a", "b"))
    assert first.secret == second.secret
    assert (first.node, second.node) == ("a", "b")
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["loopback.secret"]
    assert stat.S_IMODE((tmp_path / "state" / "loopback.secret").stat().st_mode) == 0o600


def test_own_host_name_is_served_on_all_interfaces(
    tmp_path: Path, secret_file: Path, stack: contextlib.ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's hosts file gives a host's own name a loopback address, where other nodes cannot connect."""
    monkeypatch.setattr(Endpoint, "resolve", lambda self: ["127.0.1.1"])
    monkeypatch.setattr(job_rendezvous, "_by_name", lambda _: "127.0.1.1")
    monkeypatch.setattr(job_rendezvous, "_source_address", lambda host, port: "192.0.2.9")
    port = free_port()
    network = meet(options(f"node1:{port}", job_secret_file=str(secret_file), node_rank=0), tmp_path, stack)
    assert (network.listen, network.address, network.preset) == (f"0.0.0.0:{port}", "192.0.2.9", "production")
    assert {"node1", "192.0.2.9"} <= set(network.names)


def test_gloo_is_bound_to_the_nodes_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job_rendezvous.interface_of("127.0.0.1") == "lo"
    assert job_rendezvous.interface_of("192.0.2.7") is None
    assert collective_environment("127.0.0.1", {}) == collective_environment("192.0.2.7", {}) == {}
    monkeypatch.setattr(job_rendezvous, "interface_of", lambda address: "eth7")
    assert collective_environment("192.0.2.7", {}) == {"GLOO_SOCKET_IFNAME": "eth7"}
    assert collective_environment("192.0.2.7", {"GLOO_SOCKET_IFNAME": "ib0"}) == {}


def test_impossible_node_name_is_refused(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    with pytest.raises(ConfigurationError, match="--node: "):
        meet(options(f"127.0.0.1:{free_port()}", node="a b"), tmp_path, stack)


def network_of(secret: bytes, *, is_first: bool) -> ServiceNetwork:
    return ServiceNetwork(
        node="n",
        controller="https://127.0.0.1:1",
        listen="127.0.0.1:1" if is_first else None,
        secret=derive(secret, "j", "tokens").hex(),
        authority_seed=derive(secret, "j", "authority", 48),
        names=("127.0.0.1", "localhost"),
    )


def credentials(directory: Path, secret: bytes, *, is_first: bool) -> Path:
    directory.mkdir()
    network_of(secret, is_first=is_first).write_credentials(directory)
    return directory


def test_credentials_are_private_and_keep_no_authority_key(tmp_path: Path) -> None:
    first = credentials(tmp_path / "first", b"s", is_first=True)
    names = {"secret", "agent.token", "operator.token", AUTHORITY_FILE}
    assert {path.name for path in first.iterdir()} == {*names, CERTIFICATE_FILE, KEY_FILE}
    assert stat.S_IMODE((first / KEY_FILE).stat().st_mode) == 0o600
    second = credentials(tmp_path / "second", b"s", is_first=False)
    assert {path.name for path in second.iterdir()} == names
    minted = verify_with_secret([(first / "secret").read_bytes()], (second / "agent.token").read_text())[0]
    assert (minted.role, minted.subject) == (TokenRole.AGENT, "n")
    network_of(b"s", is_first=True).write_credentials(first)  # again, as after a takeover


def test_missing_openssl_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match="the openssl program"):
        credentials(tmp_path / "first", b"s", is_first=True)


@contextlib.asynccontextmanager
async def served(directory: Path) -> Any:
    """A server with the first node's certificate; gives its URL, an event set by each answer, and its end."""
    answered = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        answered.set()
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / CERTIFICATE_FILE, directory / KEY_FILE)
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", answered, server.close
    finally:
        server.close()


def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: bytes, *, ends: bool) -> str:
    """Return the messages of a node's watch with this secret. The first node's secret is ``s``."""
    monkeypatch.setattr(job_rendezvous, "FIRST_PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(job_rendezvous, "PROBE_INTERVAL_S", 0.01)
    monkeypatch.setattr(job_rendezvous, "CERTIFICATE_TIMEOUT_S", 0.05)
    first = credentials(tmp_path / "first", b"s", is_first=True)
    own = credentials(tmp_path / "own", secret, is_first=False)

    async def play() -> str:
        async with served(first) as (url, answered, end), asyncio.timeout(60):
            tls = network_of(secret, is_first=False).tls(own)
            watch = asyncio.create_task(watch_first_node(url, tls, 0.1, SYSTEM_CLOCK))
            if ends:
                for _ in range(3):
                    answered.clear()
                    await answered.wait()
                assert not watch.done()
                end()
            return await watch

    return asyncio.run(play())


def test_watch_notices_the_loss_of_the_first_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = watched(tmp_path, monkeypatch, b"s", ends=True)
    assert "where the job's controller ran, has not answered for 0.1 s: the job ends" in sentence


def test_watch_waits_long_for_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_rendezvous, "FIRST_PROBE_INTERVAL_S", 0.0)
    clock = ManualClock()

    async def refused(endpoint: Endpoint, tls: object) -> Exception:
        clock.advance(100.0)
        return ConnectionRefusedError("refused")

    monkeypatch.setattr(job_rendezvous, "_probe", refused)
    assert asyncio.run(watch_first_node("https://192.0.2.7:1", None, 5.0, clock)) == (
        "the first node did not answer at 192.0.2.7:1 within 600 s (refused): start the launcher there, or correct "
        "--rdzv-endpoint"
    )
    assert clock.monotonic() >= 600


def test_job_has_one_launcher_on_a_node(tmp_path: Path) -> None:
    agent_socket = str(tmp_path / ("long-" * 30) / "agent.sock")
    with claim_job(agent_socket, "llama"):
        with pytest.raises(ConfigurationError, match="another launcher of job llama runs on this node"):
            claim_job(agent_socket, "llama")
        claim_job(agent_socket, "gpt").close()
        claim_job(str(tmp_path / "other.sock"), "llama").close()
    claim_job(agent_socket, "llama").close()
