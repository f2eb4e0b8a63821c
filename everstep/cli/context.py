"""What every command needs: the controller it speaks to, and a place to print."""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from everstep.cli import local_runs
from everstep.cli.client import Client, path, read_token
from everstep.errors import AuthenticationError, ConfigurationError, EverstepError, Unavailable
from everstep.plain_text import without_control
from everstep.wire.v1 import operator as op

WIDE = 10_000


class _Printer(Console):
    """A terminal's width where there is one; a pipe's lines are not broken, so that they can be searched.

    Control characters in what others said (a finding's message, a label) are shown as such: they could steer the
    terminal of whoever reads them.
    """

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = WIDE

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(without_control(segment.text), segment.style)


console = _Printer()
complaints = _Printer(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Reason = Annotated[
    str, typer.Option("--reason", "-r", help="Why; it stands in the log for ever.", callback=lambda text: _said(text))
]


def _said(reason: str) -> str:
    if not reason.strip():
        raise typer.BadParameter("say why: it stands in the log for ever")
    return reason


DEFAULT_CONTROLLER = "http://127.0.0.1:7700"


class Access(msgspec.Struct, frozen=True):
    """Where the controller is and how to be known there: by a token, or by a certificate.

    ``controller`` is empty where none was given; ``run`` names a run of everstep-launch on this machine.
    """

    controller: str = ""
    token_file: str = ""
    ca_file: str = ""
    certificate: str = ""
    key: str = ""
    run: str = ""

    def resolved(self, environ: Mapping[str, str]) -> Access:
        """Return the access with a controller: the given one, else a run's on this machine, else the usual address.

        Raises:
            ConfigurationError: several runs are on this machine and none was chosen, or the chosen one is not there.
        """
        if self.run and self.controller:
            raise ConfigurationError("--run and --controller both say where to ask: leave out one of them")
        if self.controller:
            return self
        if self.run or not (self.token_file or self.ca_file or self.certificate):
            run = local_runs.choose(local_runs.state_dir(environ), self.run)
            if run is not None:
                return Access(run.url, run.token_file)
        return msgspec.structs.replace(self, controller=DEFAULT_CONTROLLER)

    def token(self) -> str:
        """Empty where there is a certificate and no token. Raises ConfigurationError where there is neither."""
        return "" if self.certificate and not self.token_file else read_token(self.token_file)

    def tls(self) -> ssl.SSLContext | None:
        """Raises ConfigurationError for files that cannot be used."""
        if not self.ca_file and not self.certificate:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.certificate:
                context.load_cert_chain(self.certificate, self.key or None)
        except OSError as error:
            raise ConfigurationError(f"a certificate or key cannot be used: {error}") from error
        return context


@contextmanager
def controller(context: typer.Context) -> Iterator[Client]:
    """A client; errors become a sentence and an exit code."""
    given: Access = context.obj
    with complaining():
        access = given.resolved(os.environ)
        yield Client(access.controller, access.token(), tls=access.tls())


@contextmanager
def complaining() -> Iterator[None]:
    """Errors that people can mend become a sentence and an exit code."""
    try:
        yield
    except (ConfigurationError, AuthenticationError, Unavailable) as error:
        complain("everstep: ", error)
        raise typer.Exit(2) from None
    except EverstepError as error:
        complain("refused: ", error)
        raise typer.Exit(1) from None


def complain(who: str, error: Exception) -> None:
    """What is wrong, on a line of its own."""
    complaints.print(Text.assemble((who, "bold red"), str(error)), soft_wrap=True)


def order(context: typer.Context, body: Any, *place: str) -> None:
    """Gives an order at a path of these parts, and says what follows from it."""
    with controller(context) as client:
        changed = client.post(path(*place), body, op.Changed)
        print_changed(changed.sentence, changed.trace)


def show(message: Any, as_json: bool, view: RenderableType) -> None:
    """Prints a message as JSON or as people like it."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(message), indent=2).decode() + "\n")
    else:
        console.print(view)


def print_changed(sentence: str, trace: str) -> None:
    """What an order led to, and how to follow it."""
    console.print(sentence or "done", highlight=False, markup=False)
    console.print(f"everstep events --trace {trace}", style="dim", highlight=False)
