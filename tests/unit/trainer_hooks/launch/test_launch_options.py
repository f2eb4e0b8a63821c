from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import typer

from everstep.errors import ConfigurationError
from everstep_trainer.launch.options import IGNORED_FLAGS
from everstep_trainer.launch.processes import ScriptCommand, worker_environment
from tests.support.documents.command_lines import PROGRAMS, launch_settings


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def test_every_flag_of_torchrun_is_taken() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    command: Any = typer.main.get_command(PROGRAMS["everstep-launch"][0])
    ours = {name for parameter in command.params for name in parameter.opts}
    assert theirs - {"-h", "--help"} <= ours


def test_unused_flags_are_named_with_their_reason(caplog: pytest.LogCaptureFixture, script: str) -> None:
    caplog.set_level("INFO")
    with pytest.raises(SystemExit):
        PROGRAMS["everstep-launch"][0](["--rdzv_backend=c10d", "--numa-binding=node", "--replicas=9", script])
    assert caplog.messages == [f"--numa-binding has no effect: {IGNORED_FLAGS['numa_binding']}"]
    caplog.set_level("DEBUG")
    with pytest.raises(SystemExit):
        PROGRAMS["everstep-launch"][0](["--master-port=1", "--replicas=9", script])
    assert caplog.messages[-1] == f"--master-port has no effect: {IGNORED_FLAGS['master_port']}"


def test_launchers_without_agents_meet_at_the_endpoint(script: str) -> None:
    flags = ["--nnodes=2", "--rdzv-endpoint=node1:29400"]
    meeting = launch_settings([*flags, "--node_rank=1", script], {"PET_RDZV_ENDPOINT": "elsewhere:1"})
    assert meeting.meets_at_endpoint
    assert (meeting.rendezvous.rdzv_endpoint, meeting.rendezvous.node_rank) == ("node1:29400", 1)
    assert (meeting.job, meeting.vault_linger_s, meeting.endpoint_notice) == ("train", None, None)
    assert launch_settings([*flags, "--job=j", script], {}).vault_linger_s == 600


@pytest.mark.parametrize("flag", ["--spill-to=/tmp", "--start-from=/tmp/a.pt", "--sdc=light"])
def test_torchrun_script_refuses_flags_about_its_state(script: str, flag: str) -> None:
    with pytest.raises(ConfigurationError, match="keeps and checks no state"):
        launch_settings(["--torchrun-script", flag, script], {})


@pytest.mark.parametrize("flag", ["--spill-to", "--start-from", "--agent-socket", "--segment-dir"])
def test_path_that_messages_cannot_hold_is_refused(script: str, flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{flag}: /tmp/\ufffd is not in .* encoding, utf-8: .* another path"):
        launch_settings([f"{flag}=/tmp/\udcf6", script], {})


def test_command_of_a_torchrun_script_keeps_names_of_files() -> None:
    command = ScriptCommand(
        script="tr\udce4in.py", module=False, arguments=("ä",), address="127.0.0.1", grace_s=1.0, max_restarts=2
    )
    assert ScriptCommand.from_json(command.to_json()) == command


def test_endpoint_without_effect_says_why(script: str) -> None:
    flags = ["--rdzv-endpoint=localhost:0", script]
    alone, with_agent = launch_settings(flags, {}), launch_settings(["--agent-socket=/a.sock", *flags], {})
    assert alone.endpoint_notice == "--rdzv-endpoint has no effect: a job of one node has no other launcher to meet"
    assert "through their agents" in str(with_agent.endpoint_notice)
    assert not alone.meets_at_endpoint
    assert not with_agent.meets_at_endpoint
    numbered = launch_settings(["--agent-socket=/a.sock", "--node-rank=1", "--job-secret-file=/s", script], {})
    assert str(numbered.endpoint_notice).startswith("--node-rank, --job-secret-file have no effect: ")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["-m", "sh"], "omit one of them"),
        (["--nnodes=2", "--rdzv-endpoint=a:1", "sh"], "needs --torchrun-script"),
        (["./train"], "no executable program './train' here or in PATH"),
    ],
)
def test_program_that_cannot_run_is_refused(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        launch_settings(["--no-python", *flags], {})


def test_printed_local_ranks_are_numbers(script: str) -> None:
    assert launch_settings([script], {}).log_files.printed_local_ranks is None
    filtered = launch_settings([script], {"PET_LOCAL_RANKS_FILTER": "0, 12"})
    assert filtered.log_files.printed_local_ranks == frozenset({0, 12})
    with pytest.raises(ConfigurationError, match="--local-ranks-filter 0,x: expected local ranks, such as 0,1"):
        launch_settings(["--local_ranks_filter=0,x", script], {})


def test_environment_fills_options_but_never_overrides(script: str) -> None:
    environ = {"PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "9", "EVERSTEP_LAUNCH_AGENT_SOCKET": "/from/environment"}
    filled = launch_settings(["--max-restarts", "1", script], environ)
    assert (filled.nproc_per_node, filled.max_restarts, filled.agent_socket) == (4, 1, "/from/environment")
    assert launch_settings(["--agent-socket", "/given", script], environ).agent_socket == "/given"


def test_standalone_ignores_a_named_agent(script: str) -> None:
    assert launch_settings(["--standalone", script], {"EVERSTEP_LAUNCH_AGENT_SOCKET": "/a.sock"}).agent_socket is None


def test_named_job_keeps_checkpoints_for_a_returning_launcher(script: str) -> None:
    assert launch_settings([script], {}).vault_linger_s is None
    assert launch_settings(["--job", "again", script], {}).vault_linger_s == 600
    assert launch_settings(["--job", "again", "--vault-linger-s", "5", script], {}).vault_linger_s == 5
    with pytest.raises(ConfigurationError, match="--vault-linger-s 0: must be more than 0"):
        launch_settings(["--job", "again", "--vault-linger-s", "0", script], {})


@pytest.mark.parametrize(
    ("argv", "mend"),
    [
        (["--nnodes", "4:2", "--job", "j"], "minimum"),
        (["--nnodes", "two"], "1:4"),
        (["--nnodes", "2"], "--job NAME"),
        (["--nnodes", "2", "--job", "j"], "everstep-agent.*--rdzv-endpoint"),
        (["--nnodes", "2", "--rdzv-endpoint", "h", "--node-rank", "-1"], "negative"),
        (["--nnodes", "2", "--rdzv-endpoint", "h", "--first-node-timeout-s", "0"], "more than 0"),
        (["--nnodes", "2", "--job", "j", "--standalone"], "omit --nnodes"),
        (["--nproc-per-node", "many"], "gpu, cpu or auto"),
        (["--nproc-per-node", "0"], "1 to 64"),
        (["--job", "a b"], "letters"),
        (["--standbys", "-1"], "negative"),
        (["--user-retries", "-1"], "negative"),
        (["--block-nodes", "2"], "at most the maximum of --nnodes"),
        (["--priority", "2000"], "between -1000 and 1000"),
        (["--replicas", "9"], "between 1 and 8"),
        (["--hang-threshold-s", "0"], "positive"),
    ],
)
def test_impossible_options_are_refused_with_advice(script: str, argv: list[str], mend: str) -> None:
    with pytest.raises(ConfigurationError, match=mend):
        launch_settings([*argv, script], {})


def test_a_missing_script_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no script 'nowhere\.py'"):
        launch_settings(["nowhere.py"], {})


def test_default_socket_is_used_only_if_present(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "agent.sock"
    monkeypatch.setattr("everstep_trainer.launch.options.DEFAULT_AGENT_SOCKET", str(path))
    assert launch_settings([script], {}).agent_socket is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert launch_settings([script], {}).agent_socket == str(path)


def test_script_exception_ends_the_job_without_user_retries(script: str) -> None:
    assert launch_settings([script], {}).job_spec(1).max_user_retries == 0
    assert launch_settings(["--user-retries", "2", script], {}).job_spec(1).max_user_retries == 2


@pytest.mark.parametrize(
    ("flags", "preset", "mode"),
    [
        ([], "light", "report"),
        (["--sdc", "light"], "light", "enforce"),
        (["--sdc", "off"], "off", "enforce"),
        (["--sdc-mode", "enforce"], "light", "enforce"),
        (["--sdc", "standard", "--sdc-mode", "report"], "standard", "report"),
    ],
)
def test_audits_only_report_unless_asked_for(script: str, flags: list[str], preset: str, mode: str) -> None:
    spec = launch_settings([*flags, script], {}).job_spec(1)
    assert (spec.sdc, spec.sdc_mode) == (preset, mode)


def test_blocks_and_priority_are_asked_of_the_controller(script: str) -> None:
    flags = [
        "--nnodes",
        "4:8",
        "--job",
        "j",
        "--agent-socket",
        "/a.sock",
        "--block-nodes",
        "4",
        "--block-within",
        "rack",
    ]
    spec = launch_settings([*flags, "--priority", "7", script], {}).job_spec(8)
    assert (spec.block_nodes, spec.block_within, spec.priority) == (4, "rack", 7)
    with pytest.raises(ConfigurationError, match="EVERSTEP_LAUNCH_BLOCK_WITHIN: 'row' is not one of rack, switch"):
        launch_settings([script], {"EVERSTEP_LAUNCH_BLOCK_WITHIN": "row"})


def test_parity_and_spill_are_requested_of_the_controller(script: str, tmp_path: Path) -> None:
    argv = ["--nnodes=4:8", "--job=j", "--agent-socket=/a.sock", "--parity-group-size=4", "--spill-to=stored"]
    spec = launch_settings([*argv, "--spill-every=50", "--spill-keep=0", script], {}).job_spec(2)
    assert spec.spill is not None
    assert (spec.parity_group_size, spec.spill.every_steps, spec.spill.keep_last) == (4, 50, 0)
    assert spec.spill.url == str(Path.cwd() / "stored")
    assert (
        launch_settings([*argv, "--spill-to=s3://bucket/runs", script], {}).checkpoints.spill_to == "s3://bucket/runs"
    )
    assert launch_settings([script], {}).job_spec(2).spill is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--parity-group-size=4"], "needs at least 4 nodes"),
        (["--nnodes=8", "--job=j", "--agent-socket=/a.sock", "--parity-group-size=1"], "2 to 64 data nodes"),
        (["--spill-to=s3://key:hunter2@bucket"], "credentials"),
        (["--spill-to=s3://bucket/x?token=hunter2"], "credentials"),
        (["--spill-to=/x", "--spill-every=0"], "must be at least 1"),
    ],
)
def test_invalid_storage_option_is_refused_without_secrets(script: str, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        launch_settings([*argv, script], {})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        ([], True),
        (["--no-allow-bit-flips"], False),
        (["--agent-socket=/a.sock"], False),
        (["--agent-socket=/a.sock", "--allow-bit-flips"], True),
    ],
)
def test_ranks_of_a_private_run_accept_flips(script: str, flags: list[str], allowed: bool) -> None:
    options = launch_settings([*flags, script], {})
    environment = worker_environment(options, agent_socket="/a.sock", nproc=1, local_rank=0, store=("h", 1))
    assert environment["EVERSTEP_ALLOW_BIT_FLIPS"] == ("1" if allowed else None)


def test_fresh_needs_a_place_for_checkpoints(script: str) -> None:
    with pytest.raises(ConfigurationError, match="--spill-to"):
        launch_settings(["--fresh", script], {})
    options = launch_settings(["--fresh", "--spill-to=/x", script], {})
    assert not options.run_start.takes_over
    assert options.command_to_continue == "the same command without --fresh"
