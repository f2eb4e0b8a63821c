"""Shared parts of all commands: the controller connection, error reporting and output."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from everstep.client import Call, Client, read_token
from everstep.errors import AuthenticationError, ConfigurationError, EverstepError, Unavailable
from everstep.host.state_directory import preferred_state_directory, state_directory
from everstep.ids import check_name, split_address
from everstep.printable_text import escape_control, printable_json
from everstep.settings import Program
from everstep.wire.v1 import operator as op

if TYPE_CHECKING:
    import ssl

P = ParamSpec("P")
PIPE_WIDTH = 10_000


class Printer(Console):
    """A console with the terminal's width. Lines of a pipe are not broken, so that they can be searched.

    Control characters in received text (a finding's message, a label) are escaped, because they could control the
    reader's terminal.
    """

    def __init__(self, **named: Any) -> None:
        super().__init__(highlight=False, markup=False, **named)
        if "width" not in named and not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = PIPE_WIDTH

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_control(segment.text), segment.style)


console = Printer()
error_console = Printer(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


def _require_reason(reason: str) -> str:
    if not reason.strip():
        raise typer.BadParameter("give a reason: it is kept in the event log")
    return reason


Reason = Annotated[str, typer.Option("--reason", "-r", help="Reason, kept in the event log.", callback=_require_reason)]


DEFAULT_CONTROLLER = "http://127.0.0.1:7700"


class ConnectionOptions(msgspec.Struct, frozen=True):
    """Address of the controller, and a token or a certificate for it."""

    controller: str = ""
    """Addresses of the controllers, separated by commas. Default: the controller of a run of everstep-launch on this
    machine, or ``http://127.0.0.1:7700``."""
    token_file: str = ""
    """File with your token."""
    ca_file: str = ""
    """PEM file of the authority that signed the controller's certificate. Default: the system's authorities."""
    client_certificate: str = ""
    """PEM file of your certificate, which replaces the token."""
    client_key: str = ""
    """PEM file of the certificate's private key."""
    run: str = ""
    """Job name of a run of everstep-launch on this machine, to connect to its private controller."""

    def resolved(self, environ: Mapping[str, str]) -> ConnectionOptions:
        """Return the options with a controller: the given one, else that of a run on this machine, else the default.
        Raises ConfigurationError if several runs are here and none was chosen, or the chosen one does not exist."""
        if self.run and self.controller:
            raise ConfigurationError("--run and --controller exclude each other: omit one of them")
        if self.controller:
            return self
        may_be_local = self.run or not (self.token_file or self.ca_file or self.client_certificate)
        if may_be_local and (run := choose(state_dir(environ), self.run)):
            return ConnectionOptions(run.url, run.token_file)
        return msgspec.structs.replace(self, controller=DEFAULT_CONTROLLER)

    def token(self) -> str:
        """Return the token of the file, else that of a login to the controller; "" with a certificate and no token.
        Raises ConfigurationError without any, and AuthenticationError or Unavailable for a login that has ended."""
        if self.token_file:
            return read_token(self.token_file)
        if self.client_certificate:
            return ""
        from everstep.cli.login import stored

        controllers = (self.controller or DEFAULT_CONTROLLER).split(",")
        token = stored.current_token(preferred_state_directory(os.environ), controllers, self.ca_file)
        if not token and controllers == [DEFAULT_CONTROLLER]:
            raise ConfigurationError(
                "no run of everstep-launch is running here (`everstep runs` lists past ones). For a fleet give "
                "--controller, and --token-file or EVERSTEP_TOKEN_FILE: `everstep-controller token` makes one"
            )
        return token or read_token("")

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS context, or None without TLS files. Raises ConfigurationError for unusable files."""
        if not self.ca_file and not self.client_certificate:
            return None
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.client_certificate:
                context.load_cert_chain(self.client_certificate, self.client_key or None)
        except OSError as error:
            raise ConfigurationError(f"cannot use the certificate or key: {error}") from error
        return context


@contextmanager
def connected_client(context: typer.Context) -> Iterator[Client]:
    """Yield a client; print errors as a sentence and exit with a code."""
    given: ConnectionOptions = context.obj
    with reporting_errors():
        access = given.resolved(os.environ)
        # httpx imports its own command line with click and pygments where they are: as long as all the rest of it.
        sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
        token = access.token()
        # A login is refreshed during long commands too, such as `everstep top`.
        with Client(access.controller, token if access.token_file else access.token, tls=access.tls()) as client:
            yield client


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Print errors as a sentence and exit: 2 for connection and configuration, 1 for a refusal."""
    try:
        yield
    except (ConfigurationError, AuthenticationError, Unavailable) as error:
        print_error("everstep: ", error)
        raise typer.Exit(2) from None
    except EverstepError as error:
        print_error("refused: ", error)
        raise typer.Exit(1) from None


def print_error(prefix: str, error: Exception) -> None:
    """Print an error on a line of its own."""
    error_console.print(Text.assemble((prefix, "bold red"), str(error)), soft_wrap=True)


def send_order(
    context: typer.Context, order: Callable[P, Call[op.ChangeResult]], *args: P.args, **kwargs: P.kwargs
) -> None:
    """Send the order that ``order`` makes of the other arguments, and print its consequence."""
    with connected_client(context) as client:
        changed = client.send(order(*args, **kwargs))
        print_change(changed.sentence, changed.trace)


def show(message: Any, as_json: bool, view: RenderableType) -> None:
    """Print a message as JSON, or its view for people."""
    if as_json:
        sys.stdout.write(printable_json(message, indent=2) + "\n")
    else:
        console.print(view)


def get_function(client: Client) -> Callable[..., Any]:
    """Return a function that gets a path as a given type: ``get("/v1/status", FleetStatus)``."""

    def get(url_path: str, kind: type[Any], **query: Any) -> Any:
        return client.send(Call(method="GET", path=url_path, kind=kind, query=query))

    return get


def print_change(sentence: str, trace: str) -> None:
    """Print an order's consequence, and the command to follow it."""
    console.print(sentence or "done")
    console.print(f"everstep events --trace {trace}", style="dim")


PROGRAM = Program("everstep", ConnectionOptions)


# Runs on this machine. everstep-launch keeps the address of its private controller and an operator's token in a
# directory of its own, below ``$XDG_STATE_HOME/everstep``. Only files of the calling user, in directories closed to
# other users, are trusted, and only a controller that listens on loopback is contacted.

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_RUN_FILE_BYTES = 64 << 10
"""Size limit of a file in a run directory; a larger one is foreign."""


class LocalRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run with a private controller: its job, the controller's URL, and the file with a token for it."""

    job: str
    url: str
    token_file: str
    directory: Path


def state_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory in which everstep-launch makes run directories, unless --state-dir names another."""
    return state_directory(environ)


def local_runs(folder: Path) -> list[LocalRun]:
    """Return the runs whose private controller is alive, sorted by job name."""
    found = (_run_in(directory) for directory in folder.glob("run-*"))
    return sorted((run for run in found if run is not None), key=lambda run: (run.job, run.directory))


def choose(folder: Path, name: str) -> LocalRun | None:
    """Return the run that a person named by its job or directory, or the only one; None if there is none at all. Raises
    ConfigurationError if there are several, or none of that name. The message lists the existing ones."""
    runs = local_runs(folder)
    fitting = [run for run in runs if name in ("", run.job, run.directory.name)]
    if len(fitting) == 1:
        return fitting[0]
    listed = "".join(f"\n  {run.job}  ({run.directory.name}, {run.url})" for run in runs)
    if fitting:
        count = f"{len(fitting)} runs of everstep-launch"
        raise ConfigurationError(f"this machine has {count}: choose one with --run NAME{listed}")
    if name:
        others = f"; other runs:{listed}" if runs else ""
        raise ConfigurationError(f"{folder} has no run {name} with a live controller{others}")
    return None


def _run_in(directory: Path) -> LocalRun | None:
    """Return the run of a directory; None if anything differs from what this user's launcher leaves there."""
    try:
        about = directory.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
            return None
        ready = json.loads(_read(directory / "controller.json"))
        job = check_name(_read(directory / "job"), "job")
        _read(directory / "operator.token")
        pid, address = int(ready["pid"]), str(ready["address"])
        if split_address(address)[0] not in LOOPBACK or not _is_alive(pid, directory):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return LocalRun(job=job, url=f"http://{address}", token_file=str(directory / "operator.token"), directory=directory)


def _read(path: Path) -> str:
    """Return the text of a plain file of this user. Raises OSError or ValueError for other files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            raise ValueError(f"{path} is not a file of this user")
        return file.read(MAX_RUN_FILE_BYTES).decode()


def _is_alive(pid: int, directory: Path) -> bool:
    """Return whether the controller of the directory runs; its pid may be another process's by now."""
    process = Path("/proc", str(pid))
    return process.stat().st_uid == os.geteuid() and os.fsencode(directory) in (process / "cmdline").read_bytes()
