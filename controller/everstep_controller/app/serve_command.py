"""Run a controller from its settings to its end, for ``everstep-controller serve``.

This module is separate from ``everstep_controller.main`` because importing the web server and the database takes
about one second, which the other commands do not need.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from pathlib import Path

import msgspec
import uvicorn
import uvloop
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from everstep.errors import ConfigurationError, EverstepError
from everstep.host.private_files import write_private
from everstep.settings import with_values
from everstep.system_clock import SYSTEM_CLOCK
from everstep_controller.app.replica import ControllerReplica
from everstep_controller.auth.credentials import Keyring
from everstep_controller.auth.identity_provider import IdentityProvider
from everstep_controller.config import ControllerSettings, read_password
from everstep_controller.read_models.otlp_traces import check_installed
from everstep_controller.remediation.service import create_remediator
from everstep_controller.runtime.clock import check_clock_at_start
from everstep_controller.server import listener
from everstep_controller.store import table_access
from everstep_controller.store.database import open_database, parse_url
from everstep_controller.store.database_errors import DatabaseUnavailable, diagnose, redacted_url

log = logging.getLogger("everstep_controller")

EXIT_CRASHED = 70
"""Exit status after a failed transaction; the supervisor should restart the controller."""


def serve(settings: ControllerSettings) -> int:
    """Serve until the process is asked to stop, and return the exit status. Raises ConfigurationError.

    After a failed transaction the process ends at once with EXIT_CRASHED.
    """
    listener.tune_process()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


def _database(settings: ControllerSettings) -> str:
    """Return the database URL with the password from its file. Never log this URL."""
    if not settings.storage.database_password_file:
        return settings.storage.database
    url = parse_url(settings.storage.database).set(password=read_password(settings.storage.database_password_file))
    return url.render_as_string(hide_password=False)


async def _serve(settings: ControllerSettings) -> int:
    keyring = Keyring.of_file(settings.secret_file)
    listener.check_certificate(settings)
    if settings.notifications.otlp_endpoint:
        check_installed()
    provider = IdentityProvider(settings.oidc, SYSTEM_CLOCK) if settings.oidc.issuer else None
    engine = await asyncio.to_thread(
        open_database, _database(settings), migrate=settings.process.migrate, check=settings.process.check_database
    )
    await asyncio.to_thread(_check_clock, engine, settings)
    engine.dispose()  # only for the schema: each leadership opens its own connections
    listeners = [listener.listen(settings.listeners.address)]
    if (second := settings.listeners.operators_address) is not None:
        listeners.append(listener.listen(second, "operators_listen"))
    address, *operators = map(listener.address_of, listeners)
    for place in (address, *operators):
        if not settings.tls.tls_certificate and not place.startswith(("127.", "[::1]")):
            log.warning("tokens are sent in plain text on %s: give --tls-certificate and --tls-key", place)
    if not settings.process.name:
        settings = with_values(settings, {"name": _unique_name(settings, address)})
    replica = ControllerReplica(
        settings,
        keyring,
        SYSTEM_CLOCK,
        lambda: create_remediator(settings, SYSTEM_CLOCK),
        database=_database(settings),
        address=_advertised(settings, address),
        provider=provider,
    )
    running = asyncio.create_task(replica.run(), name="replica")
    await _wait_until_leader_known(running, replica, settings)
    config = listener.server_config(settings, replica)
    server = listener.ControllerServer(config, replica.close_connections, settings.leadership.stop_grace_s)
    replica.on_leadership_lost = server.close_all
    running.add_done_callback(lambda _task: server.request_stop())
    announcing = asyncio.create_task(_log_when_serving(server, settings, address, *operators))
    await server.serve(sockets=[*listener.duplicate_listeners(listeners[0]), *listeners[1:]])
    announcing.cancel()
    if settings.process.ready_file:
        Path(settings.process.ready_file).unlink(missing_ok=True)
    return await _end(running, settings)


async def _wait_until_leader_known(
    running: asyncio.Task[None], replica: ControllerReplica, settings: ControllerSettings
) -> None:
    """Wait until the leader is known. Raise ConfigurationError if this controller cannot start."""
    settled = asyncio.create_task(replica.leader_known.wait())
    await asyncio.wait({running, settled}, return_when=asyncio.FIRST_COMPLETED)
    settled.cancel()
    if not running.done():
        return
    try:
        running.result()
    except SQLAlchemyError as error:
        raise ConfigurationError(diagnose(error, parse_url(settings.storage.database))) from error
    except DatabaseUnavailable as error:
        raise ConfigurationError(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # RecursionError is not listed: any code could raise one
        raise ConfigurationError(
            f"the database cannot be read by this release ({error}): run the release that wrote it"
        ) from error


def _check_clock(engine: Engine, settings: ControllerSettings) -> None:
    """Raise ConfigurationError if this machine's clock is far ahead of the database. A restored backup is exempt."""
    if settings.clock.trust_clock:
        return
    try:
        with engine.connect() as connection:
            newest_at = 0.0 if table_access.is_copy(connection) else table_access.newest_at(connection)
    except SQLAlchemyError as error:
        raise ConfigurationError(diagnose(error, parse_url(settings.storage.database))) from error
    check_clock_at_start(SYSTEM_CLOCK.wall(), newest_at, settings.clock.max_clock_ahead_days)


_WILDCARD_PREFIXES = ("0.0.0.0:", "[::]:")


def _unique_name(settings: ControllerSettings, address: str) -> str:
    """Return a name that no other controller has."""
    if settings.leadership.advertise or not address.startswith(_WILDCARD_PREFIXES):
        return settings.leadership.advertise or address
    return f"{socket.gethostname()}:{address.rpartition(':')[2]}"


def _advertised(settings: ControllerSettings, address: str) -> str:
    """Return the URL by which others reach this controller, or "" if it listens on all interfaces without a name."""
    if not settings.leadership.advertise and address.startswith(_WILDCARD_PREFIXES):
        return ""
    scheme = "https" if settings.tls.tls_certificate else "http"
    return f"{scheme}://{settings.leadership.advertise or address}"


async def _log_when_serving(server: uvicorn.Server, settings: ControllerSettings, *addresses: str) -> None:
    while not server.started:
        await asyncio.sleep(0.002)  # uvicorn offers no event to wait for
    database = redacted_url(parse_url(settings.storage.database))
    log.info("serving on %s, database %s", " and ".join(addresses), database)
    if settings.process.ready_file:
        places = zip(("address", "operators_address"), addresses, strict=False)
        content = msgspec.json.encode({"pid": os.getpid(), **dict(places)})
        write_private(Path(settings.process.ready_file), content + b"\n")


async def _end(running: asyncio.Task[None], settings: ControllerSettings) -> int:
    """Return 0 after an orderly end. After a failed transaction end the process at once: its threads may hang."""
    running.cancel()
    await asyncio.wait({running})
    failure = None if running.cancelled() else running.exception()
    if failure is None:
        log.info("stopped")
        return 0
    message = str(failure) or type(failure).__name__
    if isinstance(failure, SQLAlchemyError):
        message = diagnose(failure, parse_url(settings.storage.database))
    log.critical(
        "a transaction failed and was not acknowledged: %s; restart the controller",
        message,
        exc_info=None if isinstance(failure, SQLAlchemyError | EverstepError) else failure,
    )
    logging.shutdown()
    os._exit(EXIT_CRASHED)
