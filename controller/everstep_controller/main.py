"""Parse the command line of ``everstep-controller``: the ``serve``, ``backup``, ``token`` and ``replay`` commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everstep import __version__
from everstep.bearer_tokens import MINTABLE_ROLES, TokenRole, mint
from everstep.errors import EverstepError
from everstep.parent_process import die_with_parent, parent_pid
from everstep_controller.config import PRESETS, ControllerSettings, load_settings, read_secrets
from everstep_controller.journal import replay
from everstep_controller.process_lifecycle import log_to_stderr

EXIT_CONFIGURATION = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="everstep-controller", description="Decides who is fit to compute.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="run a controller", argument_default=argparse.SUPPRESS)
    serve.add_argument("--listen", metavar="HOST:PORT", help="default 127.0.0.1:7700; port 0 takes any")
    serve.add_argument("--operators-listen", metavar="HOST:PORT", help="a second door, past the line of agents")
    serve.add_argument("--database", metavar="URL", help="sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME")
    serve.add_argument("--database-password-file", metavar="FILE", help="PostgreSQL's password, readable by you only")
    serve.add_argument("--secret-file", metavar="FILE", help="the fleet's secret, readable by you only")
    serve.add_argument("--preset", choices=PRESETS, default="production")
    serve.add_argument("--settings", metavar="FILE", type=Path, default=None, help="TOML with any setting")
    serve.add_argument("--ready-file", metavar="FILE", help="written when requests are served")
    serve.add_argument("--advertise", metavar="HOST:PORT", help="where others reach this controller; default as served")
    serve.add_argument("--migrate", action=argparse.BooleanOptionalAction, help="bring the schema up to date")
    serve.add_argument(
        "--check-database", action=argparse.BooleanOptionalAction, help="refuse a damaged SQLite file; default yes"
    )
    serve.add_argument("--trust-clock", action="store_true", help="believe this machine's clock, for one start")
    serve.add_argument("--die-with-parent", action="store_true", help="end when the starting process ends")
    serve.add_argument("--tls-certificate", metavar="FILE")
    serve.add_argument("--tls-key", metavar="FILE")
    serve.add_argument("--tls-client-ca", metavar="FILE", help="authorities whose client certificates stand for tokens")
    serve.add_argument("--webhook-url", metavar="URL", help="with --remediation-backend webhook")
    serve.add_argument("--webhook-secret-file", metavar="FILE")
    serve.add_argument(
        "--remediation-backend", choices=("dry_run", "webhook", "slurm", "kubernetes"), help="default dry_run"
    )
    replay.add_arguments(commands.add_parser("replay", help="decide a recorded incident again"))
    backup = commands.add_parser("backup", help="copy a SQLite database, also while a controller writes it")
    backup.add_argument("file", metavar="FILE", type=Path)
    backup.add_argument("--database", metavar="URL", default=ControllerSettings().database)
    token = commands.add_parser("token", help="print a bearer token")
    token.add_argument("--role", choices=[role.value for role in MINTABLE_ROLES], required=True)
    token.add_argument("--subject", metavar="NAME", required=True, help="a node's name for agents, yours otherwise")
    token.add_argument("--secret-file", metavar="FILE", required=True)
    return parser


def _serve(arguments: dict[str, Any], parent: int) -> int:
    log_to_stderr()
    preset, file = arguments.pop("preset"), arguments.pop("settings")
    settings = load_settings(arguments, preset=preset, file=file, environment=os.environ)
    if settings.die_with_parent:
        die_with_parent(parent)
    from everstep_controller.serve_command import serve

    return serve(settings)


def _back_up(arguments: dict[str, Any]) -> int:
    from everstep_controller.store.database import back_up

    print(f"{arguments['file']}: {back_up(arguments['database'], arguments['file'])} bytes")
    return 0


def _token(arguments: dict[str, Any]) -> int:
    secret = read_secrets(arguments["secret_file"])[0]
    print(mint(secret, TokenRole(arguments["role"]), arguments["subject"]))
    return 0


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and end the process.

    The exit status is 0, EXIT_CONFIGURATION (stderr says what to correct) or EXIT_CRASHED (``serve`` only).
    """
    parent = parent_pid()
    options = _parser().parse_args(argv)
    arguments = vars(options).copy()
    command = arguments.pop("command")
    try:
        if command == "token":
            sys.exit(_token(arguments))
        if command == "backup":
            sys.exit(_back_up(arguments))
        if command == "replay":
            sys.exit(replay.run(options))
        sys.exit(_serve(arguments, parent))
    except (EverstepError, ValueError) as error:
        print(f"everstep-controller: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)


if __name__ == "__main__":
    main()
