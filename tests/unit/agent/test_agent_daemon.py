"""The whole agent as its own process, with sensors, a vault, ranks and a stub of the controller."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.layout.slots import SLOTS_PER_RANK
from everstep.vocabulary import FindingKind, GenerationReason
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1 import local
from everstep.wire.v1.directives import NewGeneration, PauseNvml
from everstep.wire.v1.training import (
    FindingCleared,
    FindingRaised,
    GenerationSpec,
    Holder,
    JobSpec,
    LauncherJoined,
    RankLost,
    RestoreRule,
)
from tests.support.agents.agent_process import DEADLINE_S, AgentProcess, agent_process
from tests.support.agents.controller_stub import ControllerStub
from tests.support.processes.process_table import is_running
from tests.support.processes.waiting import until
from tests.support.processes.warm_programs import WarmProgram
from tests.support.vaults.vault_process import VaultClient

pytestmark = pytest.mark.slow


@pytest.fixture
def agent(controller: ControllerStub) -> Iterator[AgentProcess]:
    with agent_process(controller.url) as made:
        yield made


def spec(number: int, vault: str) -> GenerationSpec:
    return GenerationSpec(
        job="j",
        number=number,
        reason=GenerationReason.FORMED,
        sentence="",
        trace="",
        seats=("n1",),
        store="127.0.0.1:1",
        store_node="n1",
        restore=RestoreRule(),
        holders=(Holder(node="n1", vault=vault),),
        replica_nodes={},
        secret="s" * 32,
        spec=JobSpec(job="j"),
        issued_at=0.0,
    )


class Peer:
    """A launcher or a rank, which the test plays over ``agent.sock``."""

    def __init__(self, agent: AgentProcess, local_rank: int | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(agent.run_dir / "agent.sock"))
        self._frames: FrameDecoder[local.FromAgent] = FrameDecoder(local.FromAgent, local.MAX_FRAME_BYTES)
        self._heard: list[local.FromAgent] = []
        role = local.ConnectionRole.LAUNCHER if local_rank is None else local.ConnectionRole.RANK
        self.send(local.Hello(protocols=(1,), role=role, job="j", pid=os.getpid(), local_rank=local_rank))
        assert isinstance(self.receive(), local.Welcome)

    def send(self, message: object) -> None:
        self.socket.sendall(encode_frame(message))

    def receive(self) -> local.FromAgent:
        while not self._heard:
            data = self.socket.recv(1 << 16)
            assert data, "the agent closed the connection"
            self._heard += self._frames.feed(data)
        return self._heard.pop(0)


@pytest.fixture
def launcher_of() -> Iterator[type[Peer]]:
    """Return a function that makes peers, whose sockets are closed at the end."""
    made: list[Peer] = []

    class Closed(Peer):
        def __init__(self, agent: AgentProcess, local_rank: int | None = None) -> None:
            super().__init__(agent, local_rank)
            made.append(self)

    yield Closed
    for peer in made:
        peer.socket.close()


def join(peer: Peer) -> None:
    offer = LauncherJoined(job="j", at=0.0, spec=JobSpec(job="j"), launcher=5, store="127.0.0.1:1")
    peer.send(offer)


def rank_process(agent: AgentProcess, generation: int = 1) -> WarmProgram:
    output = agent.run_dir.parent / "rank"
    arguments = [str(agent.run_dir / "agent.sock"), "j", "0", str(generation), "0"]
    child = WarmProgram(["-m", "tests.support.agents.rank_peer", *arguments], Path.cwd(), os.environ, output, output)
    agent.processes.insert(0, child)
    until(lambda: "ready" in output.read_text() if output.exists() else False, "the rank is ready")
    return child


def open_segment(agent: AgentProcess) -> Path:
    """Open a rank's segment in the vault, and return its path."""
    vault = VaultClient(agent.run_dir / "vault.sock")
    try:
        answer = vault.ask(local.OpenSegment, job="j", local_rank=0, slot_bytes=4096, slots=SLOTS_PER_RANK)
        assert isinstance(answer, local.SegmentOpened), answer
        return Path(answer.path)
    finally:
        vault.close()


def leftover_files(agent: AgentProcess) -> list[str]:
    """Return the remaining files, except those for the next agent of the node."""
    kept = ("incarnation", "sensors.state", "profile.json")
    files = [p.name for p in agent.run_dir.glob("*") if p.name not in kept]
    return files + [str(p) for p in agent.segments.rglob("*")]


def test_agent_reports_rank_loss_and_forwards_new_generation(
    agent: AgentProcess, controller: ControllerStub, launcher_of: type[Peer]
) -> None:
    ready = agent.start()
    launcher = launcher_of(agent)
    join(launcher)
    controller.first_report(LauncherJoined)
    controller.push(NewGeneration(spec=spec(1, ready["vault"])))
    assert isinstance(launcher.receive(), NewGeneration)
    rank = rank_process(agent)
    controller.wait_for(lambda: controller.heartbeats and controller.heartbeats[-1].ranks)
    rank.kill()
    lost = controller.first_report(RankLost)
    assert (lost.generation, lost.rank, lost.has_replacement) == (1, 0, True)
    controller.push(NewGeneration(spec=spec(2, ready["vault"])))
    second = launcher.receive()
    assert isinstance(second, NewGeneration)
    assert second.spec.number == 2


def test_agent_closes_nvml_by_the_controllers_order(agent: AgentProcess, controller: ControllerStub) -> None:
    agent.start()
    controller.wait_for(lambda: controller.listening)
    hold = agent.run_dir / "nvml-pause"
    controller.push(PauseNvml(seconds=60.0))
    until(hold.exists, "NVML is to be closed")
    controller.push(PauseNvml(seconds=0.0))
    until(lambda: not hold.exists(), "NVML may be opened again")


def test_upgrade_keeps_the_vault_until_stop_vault_on_exit(agent: AgentProcess, controller: ControllerStub) -> None:
    first = agent.start()
    segment = open_segment(agent)
    assert agent.end() == 0
    assert is_running(first["vault_pid"])
    assert segment.exists()
    second = agent.start("--stop-vault-on-exit")
    assert second["vault_pid"] == first["vault_pid"]
    assert agent.end() == 0
    assert leftover_files(agent) == []
    until(lambda: not is_running(first["vault_pid"]), "the vault is gone")


def test_die_with_parent_ends_the_agent_of_a_killed_parent(agent: AgentProcess) -> None:
    arguments = ["--node", "n1", "--controller", agent.controller, "--token-file", str(agent.token_file)]
    arguments += ["--run-dir", str(agent.run_dir), "--segment-dir", str(agent.segments), "--virtual", "default:2"]
    command = [sys.executable, "-m", "everstep_agent.main", *arguments, "--die-with-parent"]
    parent = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"])
    try:
        ready = until(lambda: agent.ready, "the agent is ready")
        segment = open_segment(agent)
    finally:
        parent.kill()
        parent.wait()
    pids = [ready["pid"], ready["vault_pid"], ready["sensor_pid"]]
    until(lambda: not any(is_running(pid) for pid in pids), "all its processes are gone")
    assert not segment.exists()
    assert leftover_files(agent) == []


def test_die_with_parent_ends_the_helpers_of_a_killed_agent(agent: AgentProcess) -> None:
    ready = agent.start("--die-with-parent")
    segment = open_segment(agent)
    agent.kill()
    until(lambda: not any(is_running(pid) for pid in agent.pids), "all its processes are gone")
    assert not segment.exists()
    assert ready["vault_pid"] in agent.pids


def test_lost_vault_is_reported_and_replaced_at_same_address(agent: AgentProcess, controller: ControllerStub) -> None:
    first = agent.start()
    controller.wait_for(lambda: controller.listening)
    controller.push(NewGeneration(spec=spec(1, first["vault"])))
    os.kill(first["vault_pid"], signal.SIGKILL)
    raised = controller.first_report(FindingRaised).finding
    assert raised.kind is FindingKind.VAULT_LOST
    assert controller.first_report(FindingCleared).key == raised.key
    second = until(lambda: agent.ready if agent.ready["vault_pid"] != first["vault_pid"] else {}, "another vault")
    assert second["vault"] == first["vault"]
    stale = VaultClient(agent.run_dir / "vault.sock")
    try:
        answer = stale.ask(local.ConfigureJob, job="j", generation=0, secret="s" * 32, holders=())
        assert isinstance(answer, local.RequestFailed), "the new vault was not told of generation 1"
        assert answer.code == "stale"
    finally:
        stale.close()


def test_metrics_require_the_token(agent: AgentProcess) -> None:
    ready = agent.start("--dcgm-names")
    url = f"http://{ready['metrics']}/metrics"
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=DEADLINE_S)
    assert refused.value.code == 401
    refused.value.close()
    token = Path(ready["metrics_token_file"]).read_text()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        shown = answer.read().decode()
    for series in ("everstep_vault_up", "everstep_gpu_up", "DCGM_FI_DEV_GPU_TEMP", "everstep_vault_sealed_slots"):
        assert f"\n{series}{{" in shown


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--virtual", "nowhere.toml"), "nowhere.toml"),
        (("--token-file", "/nowhere"), "cannot read the agent token file /nowhere"),
        (("--vault-listen", "here"), "host:port"),
    ],
)
def test_unusable_settings_end_the_agent_with_a_message(
    agent: AgentProcess, options: tuple[str, ...], word: str
) -> None:
    assert agent.launch(*options).wait(DEADLINE_S) == 2
    assert word in agent.log()
    assert leftover_files(agent) == []
