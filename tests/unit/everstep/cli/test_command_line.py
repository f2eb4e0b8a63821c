from __future__ import annotations

import io
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from everstep import __version__
from everstep.bearer_tokens import TokenRole, mint
from everstep.cli import tables
from everstep.cli.main import app
from everstep.ids import Version
from everstep.vocabulary import Action, Decision, Finding, FindingKind, JobState, NodeState, Severity, Verdict
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.agent import Domain, Gpu, GpuGauges, Heartbeat, NumberedReport, Register, Reports
from everstep.wire.v1.operator_history import Evidence
from everstep.wire.v1.training import AnyReport, FindingRaised, JobSpec, ProbeFinished, RankLost, RankProgress, Resumed
from tests.support.fleet.controllers import (
    LONG_SILENCES,
    SECRET,
    ControllerProcess,
    controller_process,
    joined,
    registration,
)
from tests.support.fleet.in_process_fleet import FELL_OFF
from tests.support.fleet.session_client import send_message
from tests.support.processes.fork_pool import ForkPool


class Fleet:
    """Three nodes that have lived through a rank's loss and a GPU's fall."""

    def __init__(self, process: ControllerProcess) -> None:
        self.process = process
        self.numbers: dict[str, int] = {}
        for node in ("n1", "n2", "n3"):
            gpu = Gpu(index=0, uuid=f"GPU-{node}", name="H200", pci_bus_id="0000:01:00.0", memory_bytes=141 << 30)
            self.send_message(node, registration(node, gpus=(gpu,), domain=Domain(rack="r1")))
            gauges = (GpuGauges(index=0, temperature_c=61, power_w=644.5, power_limit_w=700.0, utilization=0.98),)
            self.send_message(node, Heartbeat(incarnation=1, seq=1, sent_at=0.0, findings=(), gpu_gauges=gauges))
            self.report(node, joined("gpt", 1.0, nodes=2))
        self.resumed(1)
        self.report(
            "n2",
            RankLost(job="gpt", at=1.0, generation=1, rank=1, local_rank=0, detail="killed", signal=9, trace="kill-1"),
        )
        self.resumed(2)
        progress = (RankProgress(job="gpt", generation=2, rank=0, step=7, step_s=0.04, loss=2.25),)
        self.send_message("n1", Heartbeat(incarnation=1, seq=2, sent_at=0.0, ranks=progress))
        self.report("n1", FindingRaised(finding=FELL_OFF))

    def send_message(self, node: str, message: Register | Heartbeat | Reports) -> None:
        status, answer = send_message(self.process, node, message)
        assert status == 200, answer

    def report(self, node: str, body: AnyReport) -> None:
        number = self.numbers[node] = self.numbers.get(node, 0) + 1
        self.send_message(node, Reports(incarnation=1, reports=(NumberedReport(number=number, body=body),)))

    def resumed(self, generation: int) -> None:
        for rank, node in enumerate(("n1", "n2")):
            self.report(
                node,
                Resumed(
                    job="gpt", at=1.0, generation=generation, rank=rank, step=1, restored=None, phases_s={"abort": 0.01}
                ),
            )


@pytest.fixture(scope="module")
def fleet(program_forks: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "settings.toml").write_text(f"{LONG_SILENCES}")
    with controller_process(folder, program_forks, arguments=("--settings", str(folder / "settings.toml"))) as process:
        yield Fleet(process)


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.cli.context.console.width", 240)
    monkeypatch.setattr("everstep.cli.context.error_console.width", 240)
    for name in ("EVERSTEP_CONTROLLER", "EVERSTEP_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)


def token(tmp_path: Path, role: TokenRole = TokenRole.OPERATOR, secret: bytes = SECRET) -> str:
    file = tmp_path / "token"
    file.write_text(mint(secret, role, "olga") + "\n")
    return str(file)


@pytest.fixture
def run(fleet: Fleet, tmp_path: Path) -> Any:
    def invoke(*arguments: str) -> Result:
        head = ["--controller", fleet.process.url, "--token-file", token(tmp_path)]
        return CliRunner().invoke(app, [*head, *arguments])

    return invoke


def test_status_lists_needs_with_their_commands() -> None:
    need = op.Need(
        kind="deferred_eviction",
        severity="critical",
        subject="n7",
        since=70.0,
        reason="n7 serves with gpu.xid/79 on GPU 3",
        advice="Give the job another node.",
        command="everstep node evict n7 --reason WHY",
        node="n7",
    )
    fleet = op.FleetStatus(
        version="1", epoch=1, now=190.0, started_at=0.0, nodes={"faulty": 1}, needs=(need,), need_count=3
    )
    text = "\n".join(drawn(tables.status(fleet), 120))
    assert re.search(r"n7 deferred eviction, for 2 min\s+n7 serves with gpu.xid/79 on GPU 3", text)
    assert "3 things need a person" in text
    assert "everstep node evict n7 --reason WHY" in text
    assert "and 2 more" in text
    out = [op.NodeSummary(node=name, state=NodeState.LOST, since=1.0, reason="silent") for name in ("n7", "n8")]
    others = "\n".join(drawn(tables.attention(fleet, out), 120))
    assert "n8" in others
    assert "n7" not in others


def test_status_says_that_nothing_needs_a_person_only_if_so() -> None:
    well = op.FleetStatus(version="1", epoch=1, now=1.0, started_at=0.0, nodes={}, need_count=0)
    assert "nothing needs a person" in "\n".join(drawn(tables.status(well), 120))
    waits = msgspec.structs.replace(well, need_count=1)
    assert "nothing needs a person" not in "\n".join(drawn(tables.status(waits), 120))


def test_status_names_unfit_nodes_with_reason(run: Any) -> None:
    lines = run("status").output.splitlines()
    (begin,) = [number for number, line in enumerate(lines) if "need a person" in line or "needs a person" in line]
    named = " ".join(" ".join(lines[begin:]).split())
    assert "n1" in named
    assert "fallen off the bus" in named
    assert "n3" not in named, "it is healthy"


def test_node_show_lists_gpus_findings_and_verdicts(run: Any) -> None:
    result = run("node", "show", "n1")
    assert result.exit_code == 0, result.output
    for word in ("GPU-n1", "141 GiB", "XID 79", "NVIDIA XID catalogue", "evict", "r1", "61 C", "644 W of 700"):
        assert word in result.output


def drawn(renderable: Any, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines() if line.strip()]


JOB = op.JobSummary(
    job="llama-70b-pretrain",
    state=JobState.RUNNING,
    generation=1234,
    world_size=1024,
    nodes=128,
    spares=12,
    step=1234567,
    step_s=0.0123,
    loss=12.3456,
    committed=Version(1234, 1234560),
    verified=Version(1234, 1234560),
)


def test_job_and_status_name_the_awaited_rank() -> None:
    stall = "rank 0 works alone at train.py:16; ranks 1-3 wait"
    summary = msgspec.structs.replace(JOB, stall=stall, stall_since=90.0)
    assert f"for 10 s: {stall}" in drawn(
        tables.job(op.JobDetail(summary=summary, spec=JobSpec(job="llama")), 100.0), 120
    )
    fleet = op.FleetStatus(
        version="1", now=100.0, started_at=0.0, epoch=1, jobs=(summary,), nodes={}, connected_nodes=0
    )
    assert f"llama-70b-pretrain: for 10 s: {stall}" in drawn(tables.status(fleet), 120)


def test_node_reason_fits_into_80_columns() -> None:
    why = "XID 79: GPU has fallen off the bus"
    node = op.NodeSummary(node="node-17", state=NodeState.QUARANTINED, since=0.0, reason=why, job="gpt", gpus=8)
    assert why in drawn(tables.nodes([node], 100.0), 80)[-1]


def test_job_shows_waiting_nodes_and_status_the_tripped_breaker() -> None:
    job = op.JobDetail(
        summary=JOB,
        spec=JobSpec(job="llama"),
        ineligible_nodes={"n4": "its launcher has no replacement for a lost rank"},
    )
    assert any(
        re.match(r"n4 waits\s+its launcher has no replacement", line) for line in drawn(tables.job(job, 0.0), 80)
    )
    fleet = op.FleetStatus(
        version="1", epoch=1, now=190.0, started_at=0.0, nodes={}, breaker="the budget is used up", breaker_at=10.0
    )
    assert any("stopped 3 min ago: the budget" in line for line in drawn(tables.status(fleet), 120))


@pytest.mark.parametrize(
    ("every", "shown"),
    [
        ((1, 1), "each step"),
        ((1, 2), "so losing a node may repeat up to 1 finished step"),
        (
            (4, 4),
            "every 4 steps (snapshot_budget or snapshot_every), so losing a node may repeat up to 3 finished steps",
        ),
        ((0, 0), "only versions to be committed"),
        ((), None),
    ],
)
def test_job_shows_how_often_ranks_store_steps(every: tuple[int, ...], shown: str | None) -> None:
    ranks = tuple(op.RankStatus(rank=rank, node="n1", step=9, snapshot_every=steps) for rank, steps in enumerate(every))
    lines = drawn(tables.job(op.JobDetail(summary=JOB, spec=JobSpec(job="llama"), ranks=ranks), 0.0), 160)
    found = [line.removeprefix("snapshots").strip() for line in lines if line.startswith("snapshots ")]
    assert len(found) == (shown is not None)
    assert all(line.endswith(shown or "") for line in found)


def test_verdict_explain_shows_finding_and_rule(run: Any) -> None:
    result = run("verdict", "explain", "n1-1")
    assert result.exit_code == 0, result.output
    assert "XID 79: GPU has fallen off the bus" in result.output
    assert "xid-79 (NVIDIA XID catalogue)" in result.output


def test_verdict_of_an_audit_shows_all_statements() -> None:
    evidence = {
        "step": "1204",
        "audit": "peer_replay",
        "owner_statement": "rank 3 on n17: used 5f1c, computed 5f1c again",
        "peer_statement": "rank 4 on n18: computed a0a0",
        "arbiter_statement": "rank 9 on n21: computed a0a0",
        "difference": "3 of 65536 elements differ",
    }
    finding = Finding(
        kind=FindingKind.AUDIT_MISMATCH, subject="work", severity=Severity.CRITICAL, message="wrong", evidence=evidence
    )
    verdict = Verdict(
        id="n17-1",
        node="n17",
        decision=Decision.EVICT,
        sentence="evicted",
        action=Action.REPAIR,
        evidence=(finding,),
        at=1.0,
        trace="t",
    )
    lines = drawn(tables.verdict(verdict, 2.0), 120)
    for value in evidence.values():
        assert any(value in line for line in lines), value
    assert any("owner statement" in line for line in lines)


def test_drift_is_shown_by_node_and_value() -> None:
    drift = op.Drift(
        node="n5",
        value="nic_firmware",
        actual="28.36",
        usual="28.39",
        usual_nodes=31,
        compared_nodes=32,
        kind="NVIDIA H100 in SYS-821GE",
        is_offline=True,
        sentence="differs from 31 of 32 like nodes: nic firmware 28.36 (others 28.39)",
    )
    row = drawn(tables.drift([drift]), 160)[-1]
    assert re.search(r"n5 \(offline\)\s+nic firmware\s+28.36\s+28.39\s+differs from 31 of 32", row)
    summary = op.NodeSummary(node="n5", state=NodeState.HEALTHY, since=0.0)
    detail = op.NodeDetail(summary=summary, incarnation=1, drifts=(drift,))
    assert any(drift.sentence in line for line in drawn(tables.node(detail, 1.0), 160))
    assert "no node differs" in drawn(tables.drift([]), 80)[0]


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("status",), op.FleetStatus),
        (("nodes",), op.NodeList),
        (("drift",), op.DriftList),
        (("node", "show", "n1"), op.NodeDetail),
        (("jobs",), op.JobList),
        (("job", "show", "gpt"), op.JobDetail),
        (("verdict", "explain", "n1-1"), Verdict),
        (("findings",), operator_history.FindingList),
        (("verdicts", "--node", "n1"), operator_history.VerdictList),
        (("checkpoints", "--job", "gpt"), operator_history.CheckpointList),
        (("remediations",), operator_history.RemediationList),
        (("budget",), operator_history.BudgetStatus),
        (("policy", "show"), operator_history.PolicyDocument),
        (("job", "loss-forecast", "gpt"), op.Restorability),
    ],
)
def test_json_output_decodes_for_every_read_command(run: Any, arguments: tuple[str, ...], kind: Any) -> None:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    msgspec.json.decode(result.output, type=kind)


def test_history_and_budget_commands_show_rows(run: Any) -> None:
    assert "XID 79: GPU has fallen off the bus" in run("findings", "--active").output
    assert re.search(r"n1-1\s+evict", run("verdicts").output)
    assert re.search(r"n1\s+cordon", run("remediations").output)
    assert re.search(r"fleet\s+\d+", run("budget").output)
    assert "budget.count" in run("policy", "show").output
    assert "gpu.xid" in run("policy", "show", "--rules").output
    assert "node n2" in run("job", "loss-forecast", "gpt").output
    listed = run("nodes", "--state", "healthy", "--rack", "r1").output
    assert ("n1" in listed, "n2" in listed) == (False, True)


def test_evidence_file_is_owner_only(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "n1.json"
    assert "findings" in run("evidence", "n1", "--output", str(file)).output
    assert msgspec.json.decode(file.read_bytes(), type=Evidence).node == "n1"
    assert file.stat().st_mode & 0o077 == 0


def test_policy_check_reads_change_from_file(run: Any, tmp_path: Path) -> None:
    change = tmp_path / "change.toml"
    change.write_text('[policy.budget]\ncount = 2\n\n[[rule]]\nkind = "gpu.lost"\nmode = "observe"\n')
    assert re.search(r"budget.count\s+4 -> 2", run("policy", "check", str(change)).output)
    change.write_text("[policy.budget]\ncuont = 2\n")
    wrong = run("policy", "check", str(change))
    assert (wrong.exit_code, "budget.cuont" in wrong.output) == (1, True)
    change.write_text("")
    same = run("policy", "check", str(change))
    assert (same.exit_code, "the change has no effect" in same.output) == (0, True)
    change.write_text("[knobs]\n")
    assert "give [policy] and [[rule]] with a kind" in run("policy", "check", str(change)).output
    refused = run("policy", "try", str(tmp_path / "absent.toml"))
    assert "cannot read" in refused.output


def test_refusal_exits_with_status_1(run: Any) -> None:
    result = run("node", "show", "n99")
    assert result.exit_code == 1
    assert "no node 'n99'" in result.stderr
    assert run("job", "stop", "nope", "--reason", "x").exit_code == 1


def test_probe_command_waits_for_result(run: Any, fleet: Fleet) -> None:
    def answer() -> None:
        asked: list[op.ProbeStatus] = []
        while not asked:
            _, body = fleet.process.ask("GET", "/v1/probes")
            probes = msgspec.json.decode(body, type=op.ProbeList).probes
            asked = [probe for probe in probes if set(probe.nodes) == {"n2", "n3"}]
            time.sleep(0.005)
        for node in ("n2", "n3"):
            fleet.report(node, ProbeFinished(probe=asked[0].probe, ok=True, rows=((65536, 0.0005, 2.0e9),)))

    answering = threading.Thread(target=answer)
    answering.start()
    result = run("probe", "n2", "n3", "--timeout-s", "30")
    answering.join(30)
    assert result.exit_code == 0, result.output
    assert re.search(r"64\.0 KiB\s+500 us\s+1\.9 GiB/s", result.output)
    assert re.search(r"probe-\d+\s+n2, n3\s.*\spassed", run("probes", "--node", "n3").output)
    assert json.loads(run("probes", "--node", "n1", "--json").stdout)["probes"] == []


def test_maintenance_is_planned_shown_and_cancelled(run: Any) -> None:
    plan = run("node", "maintenance", "n3", "--starts-in-hours", "48", "--hours", "2", "--reason", "a new board")
    assert plan.exit_code == 0, plan.output
    assert re.search(r"planned in 1 d 23 h for 2 h.*a new board", run("node", "show", "n3").output, re.DOTALL)
    assert run("node", "cancel-maintenance", "n3", "--reason", "no board came").exit_code == 0
    assert "planned" not in run("node", "show", "n3").output.replace("no board came", "")


def test_forget_refuses_a_connected_node(run: Any) -> None:
    refused = run("node", "forget", "n3", "--reason", "gone")
    assert (refused.exit_code, "stop its agent first" in refused.stderr) == (1, True)


def test_missing_controller_exits_with_status_2(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = CliRunner().invoke(app, ["--controller", url, "--token-file", token(tmp_path), "status"])
    assert result.exit_code == 2
    assert f"no controller answers at {url}" in result.stderr
    assert "--controller or EVERSTEP_CONTROLLER" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["status"], "--token-file or EVERSTEP_TOKEN_FILE"),
        (["--token-file", "/nonexistent", "status"], "cannot be read"),
        (["--controller", "ftp://x", "status"], "--token-file"),
    ],
)
def test_missing_token_exits_with_status_2(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert says in result.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["--controller", "http://127.0.0.1:1", "--version"]])
def test_version_needs_no_controller(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).output.strip() == __version__


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min"), (3660, "1 h 1 min"), (90000, "1 d 1 h")]
)
def test_ages_are_formatted_for_people(seconds: float, text: str) -> None:
    assert tables.age(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.00083, "830 us"), (0.0123, "12.3 ms"), (1.239, "1.24 s")])
def test_durations_are_formatted_for_people(seconds: float, text: str) -> None:
    assert tables.duration(seconds) == text
