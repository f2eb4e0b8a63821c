"""The rank's client of the vault: errors by their code, and requests that survive a restart of the vault."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.errors import NotFound, OutOfSlotMemory, Unavailable
from everstep.ids import Version
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1 import local
from everstep_trainer.slots import vault_client
from everstep_trainer.slots.vault_client import VaultClient, numa_node

Answer = Callable[[local.ToVault], local.FromVault | None]


class StubVault:
    """A vault that answers frames on a unix socket, one connection at a time; None closes the connection instead."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.asked: list[local.ToVault] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        frames: FrameDecoder[local.ToVault] = FrameDecoder(local.ToVault, local.MAX_FRAME_BYTES)
        while data := connection.recv(1 << 16):
            for message in frames.feed(data):
                self.asked.append(message)
                answer = self._answer(message)
                if answer is None:
                    return
                connection.sendall(encode_frame(answer))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Callable[[Answer], tuple[StubVault, VaultClient]]]:
    made: list[StubVault | VaultClient] = []

    def start(answer: Answer) -> tuple[StubVault, VaultClient]:
        stub = StubVault(tmp_path / "v.sock", answer)
        client = VaultClient(str(tmp_path / "v.sock"), timeout_s=10.0)
        made.extend([client, stub])
        return stub, client

    yield start
    for client in made:
        client.close()


def empty(message: local.ToVault) -> local.FromVault:
    return local.InventoryAnswer(request=message.request, slots=())


@pytest.mark.parametrize(("code", "kind"), [("not_found", NotFound), ("slot_memory", OutOfSlotMemory)])
def test_refusal_raises_the_error_of_its_code(
    talk: Callable[[Answer], tuple[StubVault, VaultClient]], code: str, kind: type[Exception]
) -> None:
    _, client = talk(lambda m: local.RequestFailed(request=m.request, code=code, message="no room at all"))
    with pytest.raises(kind, match="no room at all"):
        client.inventory("job")


def test_request_lost_with_its_vault_is_resent(
    talk: Callable[[Answer], tuple[StubVault, VaultClient]],
) -> None:
    answers: list[Callable[[local.ToVault], local.FromVault | None]] = [lambda _: None, empty]
    stub, client = talk(lambda m: answers.pop(0)(m))
    assert client.inventory("job") == ()
    assert len(stub.asked) == 2
    assert stub.asked[0] == stub.asked[1]


def test_unhashed_slots_are_asked_for_again(
    talk: Callable[[Answer], tuple[StubVault, VaultClient]],
) -> None:
    left = [2, 1, 0]
    stub, client = talk(lambda m: local.InventoryAnswer(request=m.request, slots=(), unchecked=left.pop(0)))
    assert client.inventory("job") == ()
    assert len(stub.asked) == 3


def test_inventory_skips_slots_never_hashed(
    talk: Callable[[Answer], tuple[StubVault, VaultClient]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vault_client, "STARTUP_CHECK_WAIT_S", 0.01)
    _, client = talk(lambda m: local.InventoryAnswer(request=m.request, slots=(), unchecked=1))
    assert client.inventory("job") == ()


def test_answer_to_another_request_is_ignored(
    talk: Callable[[Answer], tuple[StubVault, VaultClient]],
) -> None:
    _, client = talk(lambda m: local.InventoryAnswer(request=m.request + 1000, slots=()))
    client._timeout_s = 0.05
    with pytest.raises(Unavailable, match="did not answer in time"):
        client.inventory("job")


def test_missing_vault_is_unavailable_after_the_timeout(tmp_path: Path) -> None:
    client = VaultClient(str(tmp_path / "missing.sock"), timeout_s=0.05)
    try:
        with pytest.raises(Unavailable, match=r"missing\.sock did not answer in time"):
            client.inventory("job")
    finally:
        client.close()


def test_closing_fails_waiting_requests(tmp_path: Path) -> None:
    client = VaultClient(str(tmp_path / "missing.sock"), timeout_s=60.0)
    future = client.fetch(
        local.Fetch(request=0, job="job", node="n2", rank=0, version=Version(1, 1), ranges=(), target_path="/x")
    )
    client.close()
    with pytest.raises(Unavailable, match="was closed"):
        future.result(60)
    with pytest.raises(Unavailable, match="was closed"):
        client.inventory("job")


def machine(root: Path, *cpulists: str) -> Path:
    for node, processors in enumerate(cpulists):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    return root


def with_gpu(root: Path, numa_node: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = root / "bus/pci/devices/0000:4e:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(numa_node + "\n")
    monkeypatch.setattr(vault_client, "_gpu_address", lambda: "0000:4e:00.0")
    return root


@pytest.mark.parametrize(
    ("allowed", "node"),
    [({4, 5}, 1), ({0, 3, 8}, 0), ({3, 4}, None), ({12}, None)],
    ids=["one", "both parts", "two", "no"],
)
def test_rank_belongs_to_the_numa_node_of_all_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], node: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    assert numa_node(machine(tmp_path, "0-3,8", "4-7", "")) == node


def test_machine_with_one_numa_node_has_no_preference(tmp_path: Path) -> None:
    assert numa_node(machine(tmp_path, f"0-{os.cpu_count()}")) is None


def test_gpu_locality_precedes_processor_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert numa_node(with_gpu(machine(tmp_path, "0-3", "4-7"), "1", monkeypatch)) == 1
