"""The commands ``everstep login`` and ``everstep logout``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from everstep import oidc
from everstep.cli.context import ConnectionOptions, console, error_console, reporting_errors
from everstep.cli.login import stored
from everstep.cli.login.stored import StoredLogin
from everstep.client import Client
from everstep.errors import EverstepError
from everstep.host.state_directory import preferred_state_directory
from everstep.system_clock import SYSTEM_CLOCK


def log_in(
    context: typer.Context,
    device: Annotated[
        bool | None,
        typer.Option(
            "--device/--browser",
            help="Enter a code in a browser anywhere, or use one on this machine. Default: what this machine can.",
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1 to which the browser comes back; 0: any.")
    ] = 0,
) -> None:
    """Log in with an account of the site, for the commands that follow."""
    with reporting_errors():
        from everstep.cli.login import flows  # an import of its own: it brings a server

        oidc.check_installed("everstep login")
        given: ConnectionOptions = context.obj
        access = given.resolved(os.environ)
        controllers = access.controller.split(",")
        for url in controllers:
            oidc.check_url(url.strip(), "the controller's address")
        with Client(controllers, tls=access.tls()) as client:
            options = client.login_options()
        provider = flows.find_provider(options, access.ca_file)
        if device if device is not None else flows.prefers_device(provider, os.environ):
            tokens = flows.log_in_by_device(options, provider, access.ca_file)
        else:
            tokens = flows.log_in_by_browser(options, provider, access.ca_file, port)
        with Client(controllers, tokens.id_token, tls=access.tls()) as client:
            me = client.identity()
        login = stored.make(controllers, options.command_client_id, provider, tokens)
        stored.store(preferred_state_directory(os.environ), login)
        where = ", ".join(login.controllers)
        console.print(f"logged in to {where} as {me.subject}, with the role {me.role}", soft_wrap=True)
        if given.token_file:
            console.print(f"commands use the token file {given.token_file} all the same, until it is no longer named")
        if not tokens.refresh_token:
            minutes = (login.ends_at - SYSTEM_CLOCK.wall()) / 60
            console.print(f"for {minutes:.0f} min: the identity provider refreshes no tokens of this client")


def log_out(context: typer.Context) -> None:
    """Forget the login, and end it at the identity provider."""
    with reporting_errors():
        given: ConnectionOptions = context.obj
        access = given.resolved(os.environ)
        removed = stored.remove(preferred_state_directory(os.environ), access.controller.split(","))
        for login in removed:
            console.print(f"logged out of {', '.join(login.controllers)}")
            if login.refresh_token and login.provider.revocation_endpoint:
                _revoke(login, access.ca_file)
        if not removed:
            console.print(f"there is no login for {access.controller}")


def _revoke(login: StoredLogin, ca_file: str) -> None:
    try:
        oidc.check_installed("the end of a login at its provider")
        request = oidc.revocation_request(login.provider, login.client_id, login.refresh_token)
        status, _ = stored.send(request, ca_file)
    except EverstepError as error:
        error_console.print(f"the login is forgotten here, but not ended at its provider: {error}")
        return
    if status >= 400:
        error_console.print(f"the login is forgotten here, but its provider answered {status}")
