"""``everstep-controller``: ``serve`` runs a controller, ``backup`` copies its database, ``token`` prints a token,
``replay`` an incident once more."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from sqlalchemy.exc import SQLAlchemyError

from controller import replay_command
from controller.config import PRESETS, ControllerSettings, load_settings, read_password, read_secrets
from controller.lifecycle import log_to_stderr, write_atomically
from controller.member import Member
from controller.remediation.choose import remediator
from controller.secret_file import Keyring
from controller.serving import (
    Server,
    address_of,
    check_certificate,
    listen,
    raise_file_limit,
    server_config,
    settle_interpreter,
    warn_of_plain_text,
)
from controller.store.backup import back_up
from controller.store.database import open_database, parse_url
from controller.store.diagnose import diagnose
from controller.store.trouble import StoreAway
from everstep import __version__
from everstep.errors import ConfigurationError, EverstepError
from everstep.lineage import die_with_parent, starting_process
from everstep.system_clock import SYSTEM_CLOCK
from everstep.tokens import MINTED, TokenRole, mint

log = logging.getLogger("controller")

EXIT_CONFIGURATION = 2
EXIT_CRASHED = 70
"""A transaction failed; the supervisor should start the controller again."""


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
    serve.add_argument("--die-with-parent", action="store_true", help="end when the starting process ends")
    serve.add_argument("--tls-certificate", metavar="FILE")
    serve.add_argument("--tls-key", metavar="FILE")
    serve.add_argument("--tls-client-ca", metavar="FILE", help="authorities whose client certificates stand for tokens")
    serve.add_argument("--webhook-url", metavar="URL", help="with --remediation webhook")
    serve.add_argument("--webhook-secret-file", metavar="FILE")
    serve.add_argument("--remediation", choices=("dry_run", "webhook", "slurm", "kubernetes"), help="default dry_run")
    replay_command.add_arguments(commands.add_parser("replay", help="decide a recorded incident again"))
    backup = commands.add_parser("backup", help="copy a SQLite database, also while a controller writes it")
    backup.add_argument("file", metavar="FILE", type=Path)
    backup.add_argument("--database", metavar="URL", default=ControllerSettings().database)
    token = commands.add_parser("token", help="print a bearer token")
    token.add_argument("--role", choices=[role.value for role in MINTED], required=True)
    token.add_argument("--subject", metavar="NAME", required=True, help="a node's name for agents, yours otherwise")
    token.add_argument("--secret-file", metavar="FILE", required=True)
    return parser


def _database(settings: ControllerSettings) -> str:
    """The database's URL with the password that stands in a file; it goes into no log and no message."""
    if not settings.database_password_file:
        return settings.database
    url = parse_url(settings.database).set(password=read_password(settings.database_password_file))
    return url.render_as_string(hide_password=False)


async def _serve(settings: ControllerSettings) -> int:
    keyring = Keyring.of_file(settings.secret_file)
    check_certificate(settings)
    engine = await asyncio.to_thread(open_database, _database(settings), migrate=settings.migrate)
    engine.dispose()  # it was for the schema: each leadership has connections of its own
    listeners = [listen(settings.address)]
    if (second := settings.operators_address) is not None:
        listeners.append(listen(second, "operators_listen"))
    address, *operators = map(address_of, listeners)
    for place in (address, *operators):
        warn_of_plain_text(settings, place)
    settings = msgspec.structs.replace(settings, name=settings.name or _own_name(settings, address))
    member = Member(
        settings,
        keyring,
        SYSTEM_CLOCK,
        lambda: remediator(settings, SYSTEM_CLOCK),
        database=_database(settings),
        address=_advertised(settings, address),
    )
    running = asyncio.create_task(member.run(), name="member")
    await _begun(running, member, settings)
    server = Server(server_config(settings, member), member.release)
    member.on_change = server.hang_up
    running.add_done_callback(lambda _task: server.end())
    announcing = asyncio.create_task(_announce(server, settings, address, *operators))
    await server.serve(sockets=listeners)
    announcing.cancel()
    if settings.ready_file:
        Path(settings.ready_file).unlink(missing_ok=True)
    return await _end(running, settings)


async def _begun(running: asyncio.Task[None], member: Member, settings: ControllerSettings) -> None:
    """Waits until it is known who leads. Raises ConfigurationError where this controller cannot begin."""
    settled = asyncio.create_task(member.settled.wait())
    await asyncio.wait({running, settled}, return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()
    if not running.done():
        return
    try:
        running.result()
    except SQLAlchemyError as error:
        raise ConfigurationError(diagnose(error, parse_url(settings.database))) from error
    except StoreAway as error:
        raise ConfigurationError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"what the database holds is not understood ({error}): it was written by another release; run that one"
        ) from error


_ANYWHERE = ("0.0.0.0:", "[::]:")


def _own_name(settings: ControllerSettings, address: str) -> str:
    """A name that no other controller has."""
    if settings.advertise or not address.startswith(_ANYWHERE):
        return settings.advertise or address
    return f"{socket.gethostname()}:{address.rpartition(':')[2]}"


def _advertised(settings: ControllerSettings, address: str) -> str:
    """Where others reach this controller; empty where it listens everywhere and was not told a name."""
    if not settings.advertise and address.startswith(_ANYWHERE):
        return ""
    scheme = "https" if settings.tls_certificate else "http"
    return f"{scheme}://{settings.advertise or address}"


async def _announce(server: uvicorn.Server, settings: ControllerSettings, address: str, *operators: str) -> None:
    while not server.started:
        await asyncio.sleep(0.002)  # uvicorn offers no event for it
    database = parse_url(settings.database).render_as_string(hide_password=True)
    log.info("serving on %s, database %s", " and ".join((address, *operators)), database)
    if settings.ready_file:
        places = zip(("address", "operators_address"), (address, *operators), strict=False)
        write_atomically(Path(settings.ready_file), {"pid": os.getpid(), **dict(places)})


async def _end(running: asyncio.Task[None], settings: ControllerSettings) -> int:
    """0 after an orderly end. After a failed transaction the process ends at once: its threads may hang."""
    running.cancel()
    await asyncio.wait({running})
    failure = None if running.cancelled() else running.exception()
    if failure is None:
        log.info("stopped")
        return 0
    trouble = str(failure) or type(failure).__name__
    if isinstance(failure, SQLAlchemyError):
        trouble = diagnose(failure, parse_url(settings.database))
    log.critical(
        "a transaction came to nothing, and nothing of it was acknowledged: %s; start the controller again",
        trouble,
        exc_info=None if isinstance(failure, SQLAlchemyError | EverstepError) else failure,
    )
    logging.shutdown()
    os._exit(EXIT_CRASHED)


def _run_serve(arguments: dict[str, Any], parent: int) -> int:
    log_to_stderr()
    preset, file = arguments.pop("preset"), arguments.pop("settings")
    settings = load_settings(arguments, preset=preset, file=file, environment=os.environ)
    if settings.die_with_parent:
        die_with_parent(parent)
    raise_file_limit()
    settle_interpreter()
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(_serve(settings))


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop  # only a serving controller needs it

    return uvloop.new_event_loop()


def main(argv: Sequence[str] | None = None) -> None:
    """Ends the process with 0, EXIT_CONFIGURATION (what to mend is said on stderr) or EXIT_CRASHED."""
    parent = starting_process()
    options = _parser().parse_args(argv)
    arguments = vars(options).copy()
    command = arguments.pop("command")
    try:
        if command == "token":
            secret = read_secrets(arguments["secret_file"])[0]
            print(mint(secret, TokenRole(arguments["role"]), arguments["subject"]))
            sys.exit(0)
        if command == "backup":
            print(f"{arguments['file']}: {back_up(arguments['database'], arguments['file'])} bytes")
            sys.exit(0)
        if command == "replay":
            sys.exit(replay_command.run(options))
        sys.exit(_run_serve(arguments, parent))
    except (EverstepError, ValueError) as error:
        print(f"everstep-controller: {error}", file=sys.stderr)
        sys.exit(EXIT_CONFIGURATION)


if __name__ == "__main__":
    main()
