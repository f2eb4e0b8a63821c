"""The command line of ``everstep-agent``. ``main`` reads it in a child, because Typer loads 12 MiB."""

from __future__ import annotations

import os

import msgspec
import typer

from everstep.command_line import Flags, Version, make_app, takes_settings
from everstep_agent.config import PROGRAM
from everstep_agent.node_profile import cli as profile_cli

app = make_app(
    "Run the daemon of one node: it watches the GPUs, keeps checkpoints in memory, and reports to the controller."
)
app.add_typer(profile_cli.app, name="profile")


@app.callback(invoke_without_command=True, no_args_is_help=False)
@takes_settings(PROGRAM)
def agent(context: typer.Context, flags: Flags, _version: Version = False) -> None:
    """Pass the settings to the daemon, unless another command follows."""
    if context.invoked_subcommand is not None:
        return
    os.write(context.obj, msgspec.msgpack.encode(flags, enc_hook=str))  # unlike JSON, it keeps inf
