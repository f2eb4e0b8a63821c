"""``everstep policy``: show and explain the rules in force, and check and try a change before it is made.

Rules of agents and of the controller are read by their own programs, which this package does not import.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.text import Text

from everstep.cli import tables
from everstep.cli.context import (
    ConnectionOptions,
    Json,
    connected_client,
    console,
    reporting_errors,
    show,
)
from everstep.client import Client, calls
from everstep.command_line import make_app
from everstep.errors import ConfigurationError, Conflict, NotFound
from everstep.policy_explanations import Consequence, Explanation, ExplanationRequest, RuleExplanation
from everstep.policy_trial_results import merge_results
from everstep.settings import flatten, suggest
from everstep.wire.v1 import operator_history as history

app = make_app("Show and explain the policy, and check or try a change of it.")

T = TypeVar("T")

AGENT_PROGRAM = "everstep_agent.policy.report"
CONTROLLER_PROGRAM = "everstep_controller.app.explain_command"

AGENT_SECTIONS = {"line", "benign", "xid", "xid_clearing"}
"""Sections that only an agent's policy file has."""

Change = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="TOML file with settings under [policy] and rules as [[rule]] tables."),
]


def _read(file: Path) -> history.PolicyChange:
    """Return the change in a file, which is written as in the settings or in a policy file."""
    try:
        written: dict[str, Any] = tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigurationError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not TOML: {error}") from error
    if unknown := written.keys() - {"policy", "rule"}:
        agents = ", ".join(f"[[{section}]]" for section in sorted(AGENT_SECTIONS))
        raise ConfigurationError(
            f"{file} has {', '.join(sorted(unknown))}: give [policy] and [[rule]] with a kind for the controller, or "
            f"[[rule]] with an id, {agents} for agents"
        )
    try:
        knobs = {name.removeprefix("policy."): value for name, value in flatten({"policy": written.get("policy", {})})}
        return msgspec.convert({"knobs": knobs, "rules": written.get("rule", [])}, history.PolicyChange)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{file}: {error}") from error


@app.command("show")
def show_(
    context: typer.Context,
    rules: Annotated[bool, typer.Option("--rules", help="Show the rules on findings instead of the settings.")] = False,
    as_json: Json = False,
) -> None:
    """Show the policy in force."""
    with connected_client(context) as client:
        policy = client.policy()
        if rules:
            view = tables.table("rule", "mode", "ladder", "n of m", "source")
            for rule in policy.rules:
                name = ".".join(filter(None, (rule["kind"], rule.get("name", ""))))
                counted = "-".join(map(str, rule.get("n_of_m", (1, 1))))
                ladder = ", ".join(rule.get("ladder", ("drain", "repair")))
                view.add_row(name, rule.get("mode", "enforce"), ladder, counted, rule["source"])
        else:
            view = tables.table("setting", "value")
            for name, value in policy.knobs.items():
                view.add_row(name, str(value))
        show(policy, as_json, view)


@app.command()
def check(
    context: typer.Context,
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="A change of the controller's policy, or agents' site_policy files."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that a change is valid, and show what it changes.

    A file with rules that have an id is for agents, and is checked without a controller. Without a FILE the command
    checks the files that EVERSTEP_AGENT_SITE_POLICY or EVERSTEP_AGENT_SETTINGS name.
    """
    given = files or []
    with reporting_errors():
        agents = [file for file in given if _is_for_agents(file)]
        if len(agents) < len(given) and len(given) > 1:
            raise ConfigurationError("check a change of the controller's policy by itself")
        if not given or agents:
            checked = _run(AGENT_PROGRAM, ["check", *map(str, agents)], b"", history.PolicyCheckResult)
            _show_check(checked, checked.error, as_json)
            return
        change = _read(given[0])
    with connected_client(context) as client:
        checked = client.check_policy(change)
        _show_check(checked, f"{given[0]}: {checked.error}", as_json)


def _show_check(checked: history.PolicyCheckResult, refusal: str, as_json: bool) -> None:
    view = tables.table("what", "change")
    for key, change in checked.changes.items():
        view.add_row(key, change)
    if checked.ok or as_json:
        show(checked, as_json, view if checked.changes else "the change has no effect")
    if not checked.ok:
        raise Conflict(refusal)


def _is_for_agents(file: Path) -> bool:
    """Return whether a file is a policy of agents; False if it cannot be read."""
    try:
        written = tomllib.loads(file.read_text())
    except (OSError, ValueError):
        return False
    rules = written.get("rule", [])
    has_ids = isinstance(rules, list) and any(isinstance(rule, dict) and "id" in rule for rule in rules)
    return has_ids or bool(written.keys() & AGENT_SECTIONS)


def _run(module: str, words: Sequence[str], request: bytes, kind: type[T]) -> T:
    """Return the answer of a program of the agent or the controller, which prints its own errors."""
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return msgspec.json.decode(done.stdout, type=kind)


@app.command()
def explain(
    context: typer.Context,
    rule: Annotated[str, typer.Argument(metavar="RULE", help="Id of a rule, such as gpu-lost, xid-79 or gpu.lost.")],
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="Site policy files of the agents.")
    ] = None,
    controller_settings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings file of the controller, with its policy.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a rule: each value, the file and line that it comes from, and what really follows from its finding.

    The consequence is that of the agent's and the controller's rules together. The controller's policy is that of
    --controller-settings, of the controller that --controller or --run names, or as shipped.
    """
    request = ExplanationRequest()
    if controller_settings is None and (context.obj.controller or context.obj.run):
        with connected_client(context) as client:
            request = ExplanationRequest(document=client.policy(), origin=_controller_name(context.obj))
    settings = [] if controller_settings is None else [str(controller_settings)]
    owner, _, name = rule.rpartition(":")
    with reporting_errors():
        answer = Explanation()
        if owner != "controller":
            answer = _run(AGENT_PROGRAM, ["explain", name, *map(str, files or ())], b"", Explanation)
        found, names = answer.explanation, list(answer.names)
        if found is None and owner != "agent":
            answer = _ask_controller(msgspec.structs.replace(request, rule=name), settings)
            found, names = answer.explanation, names + list(answer.names)
        if found is None:
            raise NotFound(f"no rule is called {rule!r}; {suggest(name, names)}")
        if found.finding is not None:
            judged = _ask_controller(msgspec.structs.replace(request, finding=found.finding), settings)
            answer = msgspec.structs.replace(answer, consequence=judged.consequence)
        show(answer, as_json, _explanation_view(found, answer.consequence))


def _controller_name(options: ConnectionOptions) -> str:
    return f"the controller {options.controller}" if options.controller else f"the controller of run {options.run}"


def _ask_controller(request: ExplanationRequest, settings: list[str]) -> Explanation:
    return _run(CONTROLLER_PROGRAM, settings, msgspec.json.encode(request), Explanation)


def _explanation_view(found: RuleExplanation, consequence: Consequence | None) -> RenderableType:
    view = tables.table("key", "value", "from")
    for key, value in found.values.items():
        shown = value.value if isinstance(value.value, str) else msgspec.json.encode(value.value).decode()
        view.add_row(key, shown, value.origin)
    state = "" if found.enabled else ", turned off"
    parts: list[RenderableType] = [Text(f"{found.rule}: [[{found.section}]] of the {found.owner}{state}"), view]
    if consequence is not None:
        parts += [Text(consequence.sentence), Text(f"by {consequence.policy}", style="dim")]
    return Group(*parts)


@app.command("try")
def try_(
    context: typer.Context,
    file: Change,
    hours: Annotated[float, typer.Option(min=0.01, help="Hours of journal to decide again.")] = 168.0,
    as_json: Json = False,
) -> None:
    """Decide the recorded past again with a change, and show the evictions that differ."""
    with connected_client(context) as client:
        told = _run_trial(client, _read(file), hours)
        view = tables.table("would have been evicted", "why")
        for verdict in told.added_evictions:
            view.add_row(verdict.node, verdict.sentence)
        show(told, as_json, view if told.added_evictions else told.sentence)
        if not as_json:
            console.print(f"{told.events} events decided again; {told.sentence}")
            for line in told.avoided_evictions:
                console.print(f"avoided eviction: {line}")


def _run_trial(client: Client, change: history.PolicyChange, hours: float) -> history.PolicyTrialResult:
    """Try the change; with several controllers ask each, since each recorded the decisions of its own lead."""
    if len(client.controllers) == 1:
        return client.try_policy(change, hours=hours)
    return merge_results(client.send_to_all(calls.try_policy(change, hours=hours, local=True)))
