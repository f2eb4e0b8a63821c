"""``everstep policy``: show the rules in force, and check and try a change before it is made."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from everstep.cli import tables
from everstep.cli.context import Json, connected_client, console, show
from everstep.client import Client, calls
from everstep.command_line import make_app
from everstep.errors import ConfigurationError, Conflict
from everstep.policy_trial_results import merge_results
from everstep.settings import flatten
from everstep.wire.v1 import operator_history as history

app = make_app("Show the decision policy, and check or try a change of it.")

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
        raise ConfigurationError(f"{file} has {', '.join(sorted(unknown))}: give [policy] and [[rule]] only")
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
def check(context: typer.Context, file: Change, as_json: Json = False) -> None:
    """Check that a change is valid, and show what it changes."""
    with connected_client(context) as client:
        checked = client.check_policy(_read(file))
        view = tables.table("what", "change")
        for name, change in checked.changes.items():
            view.add_row(name, change)
        if checked.ok or as_json:
            show(checked, as_json, view if checked.changes else "the change has no effect")
        if not checked.ok:
            raise Conflict(f"{file}: {checked.error}")


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
