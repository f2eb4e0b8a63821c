"""The command line of ``everstep-agent``. ``main`` reads it in a child, because Typer loads 12 MiB."""

from __future__ import annotations

import os

import msgspec
import typer

from everstep.command_line import Flags, Version, make_app, takes_settings
from everstep_agent.config import PROGRAM

app = make_app()


@app.command()
@takes_settings(PROGRAM)
def agent(context: typer.Context, flags: Flags, _version: Version = False) -> None:
    """Run the daemon of one node: it watches the GPUs, keeps checkpoints in memory, and reports to the controller."""
    os.write(context.obj, msgspec.msgpack.encode(flags, enc_hook=str))  # unlike JSON, it keeps inf
