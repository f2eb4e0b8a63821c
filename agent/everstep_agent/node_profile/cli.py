"""The commands ``everstep-agent profile``: show what the node had while it was well, and accept its present state."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from everstep.command_line import Flags, make_app, takes_settings
from everstep.errors import ConfigurationError, exit_on_errors
from everstep_agent.config import PROGRAM, state_folders
from everstep_agent.node_profile.profile import describe
from everstep_agent.node_profile.store import PROFILE_FILE, order_acceptance, read_profile

app = make_app("Show what this node had while it was well, or accept its present state.", completion=False)

Subjects = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PART]...", help="PCI addresses of GPUs, names of ports, or host. Default: all."),
]


@app.command("show")
@takes_settings(PROGRAM, "node", "run_dir", "state_dir")
def show(flags: Flags) -> None:
    """Print each part of the node with the values that the agent expects, and those that differ now."""
    with exit_on_errors(PROGRAM.name, (ConfigurationError, ValueError)):
        lines = list(describe(read_profile(_folder(flags))))
    print("\n".join(lines) or "nothing is learned yet: the agent needs ten minutes on a healthy node")


@app.command("accept")
@takes_settings(PROGRAM, "node", "run_dir", "state_dir")
def accept(flags: Flags, parts: Subjects = None) -> None:
    """Let the agent expect the present state of parts of this node from now on."""
    with exit_on_errors(PROGRAM.name):
        folder = _folder(flags)
        if os.geteuid() == 0:
            os.seteuid(folder.stat().st_uid)  # the agent has to be able to read the order
        order_acceptance(folder, parts or [])
    print("the agent accepts it within ten seconds, or at its next start")


def _folder(flags: Flags) -> Path:
    folders = state_folders(PROGRAM.read(flags, os.environ), os.environ)
    return next((folder for folder in folders if (folder / PROFILE_FILE).exists()), folders[-1])
