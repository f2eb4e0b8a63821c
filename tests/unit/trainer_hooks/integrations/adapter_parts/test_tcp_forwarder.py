"""Connections through a forwarder: bytes in both directions, and the end of the server as clients see it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from everstep_trainer.integrations.adapter_parts.tcp_forwarder import TcpForwarder

TIMEOUT_S = 20.0


class Server:
    """Echo all bytes until the test cuts the connections."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections: list[socket.socket] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while True:
                connection, _ = self._listener.accept()
                self.connections.append(connection)
                while data := connection.recv(1 << 16):
                    connection.sendall(data)
        except OSError:
            return

    def cut(self) -> None:
        for endpoint in (*self.connections, self._listener):
            try:
                endpoint.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            endpoint.close()
        self._thread.join(TIMEOUT_S)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.cut()


def connected(forwarder: TcpForwarder) -> socket.socket:
    return socket.create_connection(("127.0.0.1", forwarder.port), TIMEOUT_S)


def received(client: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (part := client.recv(1 << 16)):
        data += part
    return data


def test_forwarder_passes_bytes_in_both_directions(server: Server) -> None:
    forwarder = TcpForwarder("127.0.0.1", ("127.0.0.1", server.port), hold=True)
    sent = bytes(range(256)) * 8192
    with connected(forwarder) as client:
        threading.Thread(target=client.sendall, args=(sent,), daemon=True).start()
        assert received(client, len(sent)) == sent
    forwarder.close()


@pytest.mark.parametrize("hold", [True, False])
def test_held_client_does_not_see_the_servers_end(server: Server, hold: bool) -> None:
    forwarder = TcpForwarder("127.0.0.1", ("127.0.0.1", server.port), hold=hold)
    with connected(forwarder) as client:
        client.sendall(b"ping")
        assert received(client, 4) == b"ping"
        server.cut()
        if hold:
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.sendall(b"no server")
        else:
            assert client.recv(1) == b""
        forwarder.close_when_idle() if hold else forwarder.close()
    forwarder._thread.join(TIMEOUT_S)
    assert not forwarder._thread.is_alive(), "the forwarder must end with its last client"
    forwarder.close()


def test_refused_server_closes_the_client() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    forwarder = TcpForwarder("127.0.0.1", ("127.0.0.1", port), hold=True)
    with connected(forwarder) as client:
        assert client.recv(1) == b""
    forwarder.close()
