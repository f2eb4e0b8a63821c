"""The whole agent as its own process: sensors, vault, ranks and a controller on the other side."""

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
from everstep.vocabulary import FindingKind, GenerationReason, ProbeKind
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1 import local
from everstep.wire.v1.directives import KillRank, NewGeneration, RunProbe, StopJob
from everstep.wire.v1.training import (
    FindingCleared,
    FindingRaised,
    GenerationSpec,
    Holder,
    JobSpec,
    LauncherJoined,
    ProbeFinished,
    RankLost,
    RankUnresponsive,
    RestoreRule,
)
from tests.support.agents import DEADLINE_S, TOKEN, AgentProcess, agent_process
from tests.support.controller_stub import ControllerStub
from tests.support.processes import is_running
from tests.support.vaults import VaultClient
from tests.support.waiting import until
from tests.support.warm_launcher import WarmProgram

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
    """A launcher, or a rank, played by the test over ``agent.sock``."""

    def __init__(self, agent: AgentProcess, local_rank: int | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(DEADLINE_S)
        self.socket.connect(str(agent.run_dir / "agent.sock"))
        self._frames: FrameDecoder[local.FromAgent] = FrameDecoder(local.FromAgent, local.MAX_FRAME_BYTES)
        self._heard: list[local.FromAgent] = []
        role = local.ConnectionRole.LAUNCHER if local_rank is None else local.ConnectionRole.RANK
        self.say(local.Hello(protocols=(1,), role=role, job="j", pid=os.getpid(), local_rank=local_rank))
        assert isinstance(self.next(), local.Welcome)

    def say(self, message: object) -> None:
        self.socket.sendall(encode_frame(message))

    def next(self) -> local.FromAgent:
        while not self._heard:
            data = self.socket.recv(1 << 16)
            assert data, "the agent closed the connection"
            self._heard += self._frames.feed(data)
        return self._heard.pop(0)


@pytest.fixture
def launcher_of() -> Iterator[type[Peer]]:
    """Makes peers whose sockets are closed at the end."""
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
    peer.say(offer)


def rank_process(agent: AgentProcess, generation: int = 1) -> WarmProgram:
    said = agent.run_dir.parent / "rank"
    arguments = [str(agent.run_dir / "agent.sock"), "j", "0", str(generation), "0"]
    child = WarmProgram(["-m", "tests.support.local_peer", *arguments], Path.cwd(), os.environ, said, said)
    agent.lives.insert(0, child)
    until(lambda: "ready" in said.read_text() if said.exists() else False, "the rank is ready")
    return child


def a_segment(agent: AgentProcess) -> Path:
    """A rank's segment in the vault."""
    vault = VaultClient(agent.run_dir / "vault.sock")
    try:
        answer = vault.ask(local.OpenSegment, job="j", local_rank=0, slot_bytes=4096, slots=SLOTS_PER_RANK)
        assert isinstance(answer, local.SegmentOpened), answer
        return Path(answer.path)
    finally:
        vault.close()


def left_of(agent: AgentProcess) -> list[str]:
    """What is still there and is not for the node's next agent."""
    files = [p.name for p in agent.run_dir.glob("*") if p.name not in ("incarnation", "sensors.state")]
    return files + [str(p) for p in agent.segments.rglob("*")]


def test_agent_registers_its_gpus_and_cleans_up(agent: AgentProcess, controller: ControllerStub) -> None:
    ready = agent.start()
    controller.wait_for(lambda: controller.beats)
    (registered,) = controller.registered
    assert (registered.node, registered.incarnation, registered.vault) == ("n1", ready["incarnation"], ready["vault"])
    assert len(registered.gpus) == 2
    assert registered.boot_id
    assert agent.run_dir.stat().st_mode & 0o777 == 0o700
    assert (agent.run_dir / "agent.json").stat().st_mode & 0o777 == 0o600
    assert agent.end() == 0
    assert left_of(agent) == []
    until(lambda: not any(is_running(pid) for pid in agent.pids), "all its processes are gone")
    assert TOKEN not in agent.said()


def test_ctrl_c_is_an_orderly_end(agent: AgentProcess) -> None:
    agent.start()
    agent.process.send_signal(signal.SIGINT)
    assert agent.process.wait(DEADLINE_S) == 0
    assert left_of(agent) == []


def test_agent_reports_rank_loss_and_forwards_new_generation(
    agent: AgentProcess, controller: ControllerStub, launcher_of: type[Peer]
) -> None:
    ready = agent.start()
    launcher = launcher_of(agent)
    join(launcher)
    controller.one(LauncherJoined)
    controller.push(NewGeneration(spec=spec(1, ready["vault"])))
    assert isinstance(launcher.next(), NewGeneration)
    rank = rank_process(agent)
    controller.wait_for(lambda: controller.beats and controller.beats[-1].ranks)
    rank.kill()
    lost = controller.one(RankLost)
    assert (lost.generation, lost.rank, lost.has_replacement) == (1, 0, True)
    controller.push(NewGeneration(spec=spec(2, ready["vault"])))
    second = launcher.next()
    assert isinstance(second, NewGeneration)
    assert second.spec.number == 2


def test_stopped_rank_is_reported_and_killed_on_order(agent: AgentProcess, controller: ControllerStub) -> None:
    ready = agent.start()
    controller.wait_for(lambda: controller.listening)
    controller.push(NewGeneration(spec=spec(1, ready["vault"])))
    rank = rank_process(agent)
    rank.send_signal(signal.SIGSTOP)
    assert controller.one(RankUnresponsive).process_state == "T"
    controller.push(KillRank(job="j", generation=1, rank=0, local_rank=0, reason="it hangs"))
    assert rank.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_critical_finding_does_not_wait_for_the_next_beat(agent: AgentProcess, controller: ControllerStub) -> None:
    controller.interval_s = DEADLINE_S
    agent.start()
    controller.wait_for(lambda: controller.registered)
    bus = controller.registered[0].gpus[0].pci_bus_id
    with agent.kernel_log.open("a") as log:
        log.write(f"NVRM: Xid (PCI:{bus}): 79, pid=1, GPU has fallen off the bus.\n")
    raised = controller.wait_for(
        lambda: [r for r in controller.reports(FindingRaised) if r.finding.kind is not FindingKind.SENSOR_FAILED]
    )
    assert raised[0].finding.severity == "critical"
    assert raised[0].finding.trace


def test_restarted_agent_recovers_its_vault_and_reports(agent: AgentProcess, controller: ControllerStub) -> None:
    first = agent.start()
    controller.wait_for(lambda: controller.listening)
    controller.push(NewGeneration(spec=spec(1, first["vault"])))
    rank = rank_process(agent)
    segment = a_segment(agent)
    controller.stop()
    rank.kill()
    until(lambda: (agent.run_dir / "reports.spool").stat().st_size, "the loss is in the spool")
    agent.kill()
    assert is_running(first["vault_pid"])
    controller.start()
    second = agent.start()
    assert second["vault_pid"] == first["vault_pid"]
    assert second["vault"] == first["vault"]
    assert second["incarnation"] > first["incarnation"]
    assert controller.one(RankLost).generation == 1
    assert segment.exists()


def test_upgrade_keeps_the_vault_until_stop_vault_on_exit(agent: AgentProcess, controller: ControllerStub) -> None:
    first = agent.start()
    segment = a_segment(agent)
    assert agent.end() == 0
    assert is_running(first["vault_pid"])
    assert segment.exists()
    second = agent.start("--stop-vault-on-exit")
    assert second["vault_pid"] == first["vault_pid"]
    assert agent.end() == 0
    assert left_of(agent) == []
    until(lambda: not is_running(first["vault_pid"]), "the vault is gone")


def test_die_with_parent_ends_the_agent_of_a_killed_parent(agent: AgentProcess) -> None:
    arguments = ["--node", "n1", "--controller", agent.controller, "--token-file", str(agent.token_file)]
    arguments += ["--run-dir", str(agent.run_dir), "--segment-dir", str(agent.segments), "--virtual", "default:2"]
    command = [sys.executable, "-m", "everstep_agent.main", *arguments, "--die-with-parent"]
    parent = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"])
    try:
        ready = until(lambda: agent.ready, "the agent is ready")
        segment = a_segment(agent)
    finally:
        parent.kill()
        parent.wait()
    pids = [ready["pid"], ready["vault_pid"], ready["sensor_pid"]]
    until(lambda: not any(is_running(pid) for pid in pids), "all its processes are gone")
    assert not segment.exists()
    assert left_of(agent) == []


def test_die_with_parent_ends_the_helpers_of_a_killed_agent(agent: AgentProcess) -> None:
    ready = agent.start("--die-with-parent")
    segment = a_segment(agent)
    agent.kill()
    until(lambda: not any(is_running(pid) for pid in agent.pids), "all its processes are gone")
    assert not segment.exists()
    assert ready["vault_pid"] in agent.pids


def test_lost_vault_is_reported_and_replaced_at_same_address(agent: AgentProcess, controller: ControllerStub) -> None:
    first = agent.start()
    controller.wait_for(lambda: controller.listening)
    controller.push(NewGeneration(spec=spec(1, first["vault"])))
    os.kill(first["vault_pid"], signal.SIGKILL)
    raised = controller.one(FindingRaised).finding
    assert raised.kind is FindingKind.VAULT_LOST
    assert controller.one(FindingCleared).key == raised.key
    second = until(lambda: agent.ready if agent.ready["vault_pid"] != first["vault_pid"] else {}, "another vault")
    assert second["vault"] == first["vault"]
    stale = VaultClient(agent.run_dir / "vault.sock")
    try:
        answer = stale.ask(local.ConfigureJob, job="j", generation=0, secret="s" * 32, holders=())
        assert isinstance(answer, local.RequestFailed), "the new vault was not told of generation 1"
        assert answer.code == "stale"
    finally:
        stale.close()


def test_a_stopped_job_leaves_no_segments(agent: AgentProcess, controller: ControllerStub) -> None:
    ready = agent.start()
    controller.wait_for(lambda: controller.listening)
    controller.push(NewGeneration(spec=spec(1, ready["vault"])))
    segment = a_segment(agent)
    controller.push(StopJob(job="j", ok=True, reason="done"))
    until(lambda: not segment.exists(), "the segment is unlinked")


def test_wrong_product_is_kept_for_the_probe_of_its_node(
    agent: AgentProcess, controller: ControllerStub, launcher_of: type[Peer]
) -> None:
    agent.start()
    controller.wait_for(lambda: controller.listening)
    product = local.WrongProduct(work="up", dtype="float32", rows=1, inner=1, columns=1, left=bytes(4), right=bytes(4))
    launcher_of(agent, local_rank=0).say(product)
    file = agent.run_dir / "wrong-products"
    until(file.exists, "the product is kept")
    assert file.stat().st_mode & 0o777 == 0o600
    controller.push(RunProbe(probe="p1", nodes=("n1",), store="127.0.0.1:0", kind=ProbeKind.COMPUTE, timeout_s=60.0))
    assert controller.one(ProbeFinished).ok


def test_probe_for_other_nodes_is_answered_as_failed(agent: AgentProcess, controller: ControllerStub) -> None:
    agent.start()
    controller.wait_for(lambda: controller.listening)
    controller.push(RunProbe(probe="p1", nodes=("n8", "n9"), store="127.0.0.1:0"))
    finished = controller.one(ProbeFinished)
    assert (finished.probe, finished.ok) == ("p1", False)


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


def test_second_agent_in_one_run_directory_is_refused(agent: AgentProcess) -> None:
    agent.start()
    second = agent.launch()
    assert second.wait(DEADLINE_S) == 2
    assert "another agent runs in" in agent.said()


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
    assert word in agent.said()
    assert left_of(agent) == []


def test_vault_start_failure_ends_the_agent_with_a_message(agent: AgentProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        life = agent.launch("--vault-listen", f"127.0.0.1:{taken.getsockname()[1]}")
        assert life.wait(DEADLINE_S) == 1
    assert "the vault ended with status" in agent.said()
