"""``everstep token``: list, issue, revoke and rotate credentials."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import RenderableType
from rich.text import Text

from everstep.bearer_tokens import TokenRole
from everstep.cli import tables
from everstep.cli.context import Json, Reason, connected_client, console, send_order, show
from everstep.cli.events import parse_duration
from everstep.cli.tables import age
from everstep.client import calls
from everstep.command_line import make_app
from everstep.errors import ConfigurationError, EverstepError
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1 import enrolment as wire

app = make_app("Issue, list, revoke and rotate credentials.")

Duration = Annotated[str, typer.Option(metavar="TIME", help="Such as 90s, 30m, 12h or 30d.")]
Out = Annotated[
    str, typer.Option(metavar="FILE", help="Write the token to this file (mode 0600) instead of the terminal.")
]
CredentialId = Annotated[str, typer.Argument(metavar="ID")]


@app.command("list")
def list_(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Include expired and revoked credentials.")] = False,
    role: Annotated[str, typer.Option(help="Show only credentials of this role, such as operator.")] = "",
    subject: Annotated[str, typer.Option(metavar="NAME", help="Show only those of this node, job or person.")] = "",
    as_json: Json = False,
) -> None:
    """List credentials. Their tokens are not stored and cannot be shown."""
    with connected_client(context) as client:
        listed = client.credentials(role=role, subject=subject).collect()
        now = SYSTEM_CLOCK.wall()
        living = [credential for credential in listed.credentials if everything or _is_valid(credential, now)]
        show(wire.CredentialList(credentials=tuple(living)), as_json, _table(living, now))


@app.command("show")
def show_(context: typer.Context, id: CredentialId, as_json: Json = False) -> None:
    """Show one credential, valid or not."""
    with connected_client(context) as client:
        found = client.credential(id)
        show(found, as_json, _table([found], SYSTEM_CLOCK.wall()))


@app.command()
def issue(
    context: typer.Context,
    role: Annotated[Literal["agent", "trainer", "operator", "viewer", "join"], typer.Option(help="Permissions.")],
    reason: Reason,
    subject: Annotated[
        str, typer.Option(metavar="NAME", help="The node, job or person; for join, a pattern of node names.")
    ] = "",
    expires: Duration = "",
    uses: Annotated[int, typer.Option(min=0, help="With join: nodes that it may enrol; 0 for any number.")] = 1,
    replace: Annotated[bool, typer.Option(help="With join: also permit nodes that are enrolled already.")] = False,
    note: Annotated[str, typer.Option(help="A note for people.")] = "",
    out: Out = "",
) -> None:
    """Issue a credential and show its token, which cannot be shown again."""
    with connected_client(context) as client:
        about: dict[str, Any] = {"subject": subject, "reason": reason, "note": note}
        about["expires_in_s"] = parse_duration(expires) if expires else None
        if role == "join":
            about |= {"subject": subject or "*", "uses": uses or None, "replace": replace}
        elif not subject:
            subjects = {"agent": "the node", "trainer": "the job"}
            raise ConfigurationError(f"--role {role} needs --subject: {subjects.get(role, 'the person')}")
        body = _KINDS[role](**about)
        _output_token(out, partial(client.issue_credential, body))


@app.command()
def revoke(context: typer.Context, id: CredentialId, reason: Reason) -> None:
    """Revoke a credential at once."""
    send_order(context, calls.revoke_credential, id, reason=reason)


@app.command()
def rotate(context: typer.Context, id: CredentialId, reason: Reason, grace: Duration = "1h", out: Out = "") -> None:
    """Issue a new credential for the same subject. The old one stays valid for the grace period."""
    with connected_client(context) as client:
        grace_s = parse_duration(grace)
        _output_token(out, partial(client.rotate_credential, id, reason=reason, grace_s=grace_s))


_KINDS: dict[str, type[wire.IssueRequest]] = {
    "agent": wire.IssueAgent,
    "trainer": wire.IssueTrainer,
    "operator": wire.IssueOperator,
    "viewer": wire.IssueViewer,
    "join": wire.IssueJoin,
}


def _output_token(out: str, request: Callable[[], wire.Issued]) -> None:
    """Request a credential, and output its token. The file is made first, because the token is shown only once."""
    if not out:
        typer.echo(request().token)  # alone on stdout, so that it can be piped
        return
    try:
        descriptor = os.open(Path(out), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(f"cannot write {out}: {error.strerror}; give a new file") from error
    with os.fdopen(descriptor, "w") as file:
        try:
            issued = request()
        except EverstepError:
            Path(out).unlink()
            raise
        file.write(issued.token + "\n")
    console.print(f"wrote the token of credential {issued.credential.id} to {out}")


def _is_valid(one: wire.Credential, now: float) -> bool:
    return one.revoked_at is None and (one.expires_at is None or now < one.expires_at)


def _table(credentials: Sequence[wire.Credential], now: float) -> RenderableType:
    made = tables.table("id", "role", "of", "since", "by", "state", "note", right=("since",))
    for credential in credentials:
        made.add_row(
            credential.id,
            credential.role,
            credential.subject,
            age(now - credential.created_at),
            credential.created_by,
            _state(credential, now),
            credential.note or "-",
        )
    return made


def _state(one: wire.Credential, now: float) -> Text:
    if one.revoked_at is not None:
        return Text(f"revoked {age(now - one.revoked_at)} ago", style="red")
    if one.expires_at is not None and one.expires_at <= now:
        return Text(f"expired {age(now - one.expires_at)} ago", style="red")
    words = ["good" if one.expires_at is None else f"for {age(one.expires_at - now)}"]
    if one.role is TokenRole.JOIN:
        words.append("any number" if one.uses_left is None else f"{one.uses_left} left")
    if one.replace:
        words.append("replaces")
    return Text(", ".join(words), style="green" if one.uses_left != 0 else "dim")
