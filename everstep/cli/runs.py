"""``everstep runs``: the runs of everstep-launch on this machine, past and present; and the receipt of any job."""

from __future__ import annotations

import datetime
import os
import sys
import webbrowser
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

import msgspec
import typer

from everstep.cli import tables
from everstep.cli.context import (
    Json,
    LocalRun,
    choose,
    connected_client,
    console,
    local_runs,
    reporting_errors,
    show,
    state_dir,
)
from everstep.client import Client, read_token
from everstep.command_line import make_app
from everstep.errors import ConfigurationError, EverstepError
from everstep.host.private_files import write_private
from everstep.printable_text import printable_json
from everstep.receipts.page import render_page
from everstep.receipts.receipt_files import StoredReceipt, find_receipt, stored_receipts
from everstep.receipts.text import format_count, format_span, format_work, summary_lines
from everstep.wire.v1.receipts import JobReceipt

app = make_app("List the runs of everstep-launch on this machine, with their receipts.")

StateDirectory = Annotated[
    Path | None, typer.Option("--state-dir", help="Folder that everstep-launch was given as --state-dir.")
]
MinutesOption = Annotated[
    float, typer.Option("--checkpoint-every-min", min=0.1, help="Minutes between checkpoints of the restarts.")
]
RestartOption = Annotated[float, typer.Option("--restart-s", min=0, help="Seconds that each restart takes.")]


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        number: Number for ``everstep runs show``; 0 for one that still runs.
        receipt: Its receipt, so far for one that still runs; None if its controller does not answer.
        path: The receipt as JSON; the page is beside it. Empty while it runs.
    """

    number: int
    job: str
    receipt: JobReceipt | None
    path: str = ""


@app.callback(invoke_without_command=True, no_args_is_help=False)
def runs(context: typer.Context, state_directory: StateDirectory = None, as_json: Json = False) -> None:
    """List the runs of everstep-launch on this machine: those that run now, and the newest 200 past ones."""
    if context.invoked_subcommand is not None:
        return
    with reporting_errors():
        found = list(_listed(_folder(state_directory)))
        show(found, as_json, _table(found))


@app.command("show")
def show_run(
    run: Annotated[str, typer.Argument(metavar="JOB|NUMBER", help="A job, or a number from `everstep runs`.")],
    state_directory: StateDirectory = None,
    as_json: Json = False,
) -> None:
    """Show the receipt of a past run: of a job the newest one."""
    with reporting_errors():
        stored = find_receipt(_folder(state_directory), run)
        show_receipt(stored.receipt, as_json)
        if not as_json:
            console.print(f"page: {stored.page}", style="dim")


DISPLAY_VARIABLES = ("DISPLAY", "WAYLAND_DISPLAY")
"""Environment variables of a desktop, on which a browser can be opened."""


def open_page(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="A job from `everstep runs`.")] = "",
    state_directory: StateDirectory = None,
) -> None:
    """Print the link to the web page of a run that runs now, and open it on a desktop.

    The link has the run's token in it: a person who has the link can give orders while the run lasts.
    """
    with reporting_errors():
        folder = _folder(state_directory)
        run = choose(folder, job or context.obj.run)
        if run is None:
            raise ConfigurationError(f"{folder} has no run with a live controller: see `everstep runs`")
        token = urlencode({"token": read_token(run.token_file), "to": f"/job/{run.job}"})
        link = f"{run.url}/#{token}"
        sys.stdout.write(f"{link}\n")
        if sys.stdout.isatty() and any(map(os.environ.get, DISPLAY_VARIABLES)):
            _browse(run.directory / "open.html", link)


def _browse(page: Path, link: str) -> None:
    """Open the link through a private file, because other users can read the browser's command line."""
    target = escape(link, quote=True)
    write_private(page, f'<meta http-equiv="refresh" content="0;url={target}"><a href="{target}">Open</a>'.encode())
    webbrowser.open(page.as_uri())


def job_receipt(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB")],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the receipt as a page.")] = None,
    checkpoint_every_min: MinutesOption = 30.0,
    restart_s: RestartOption = 60.0,
    as_json: Json = False,
) -> None:
    """Show what a job did, and what failures cost compared with restarts from checkpoints."""
    with connected_client(context) as client:
        receipt = client.receipt(job, checkpoint_interval_s=60 * checkpoint_every_min, restart_s=restart_s)
        if html is not None:
            try:
                write_private(html, render_page(receipt).encode())
            except OSError as error:
                raise ConfigurationError(f"cannot write {html}: {error.strerror}") from error
        if html is None or as_json:
            show_receipt(receipt, as_json)
        else:
            console.print(f"{html}: {receipt.job} {receipt.outcome}, {_recoveries(receipt)}")


def show_receipt(receipt: JobReceipt, as_json: bool) -> None:
    """Print a receipt in lines, or as JSON."""
    if as_json:
        sys.stdout.write(printable_json(receipt, indent=2) + "\n")
        return
    for line in summary_lines(receipt):
        console.print(line)
    if receipt.sentence:
        console.print(receipt.sentence, style="dim")


def _folder(given: Path | None) -> Path:
    return given if given is not None else state_dir(os.environ)


def _listed(folder: Path) -> Iterator[ListedRun]:
    """Yield the running ones, then the past ones, newest first."""
    for run in local_runs(folder):
        yield ListedRun(number=0, job=run.job, receipt=_ask(run))
    for number, stored in enumerate(stored_receipts(folder), 1):
        yield _past(number, stored)


def _past(number: int, stored: StoredReceipt) -> ListedRun:
    return ListedRun(number=number, job=stored.receipt.job, receipt=stored.receipt, path=str(stored.path))


def _ask(run: LocalRun) -> JobReceipt | None:
    """Return the receipt so far; None before the first launcher has joined, or if the controller does not answer."""
    try:
        with Client(run.url, read_token(run.token_file)) as client:
            return client.receipt(run.job)
    except EverstepError:
        return None


def _recoveries(receipt: JobReceipt) -> str:
    return format_count(receipt.recovery_count, "recovery", "recoveries")


def _table(found: list[ListedRun]) -> tables.ResponsiveTable:
    wide = ["#", "job", "began", "duration", "steps", "recoveries", "lost", "saved", "result"]
    narrow = ["#", "job", "began", "steps", "lost", "result"]
    numbers = ("#", "duration", "steps", "recoveries", "lost", "saved")
    return tables.ResponsiveTable(map(_row, found), columns={100: wide, 0: narrow}, right=numbers)


def _row(one: ListedRun) -> dict[str, str]:
    number = str(one.number) if one.number else "-"
    receipt = one.receipt
    if receipt is None:
        row = dict.fromkeys(("began", "duration", "steps", "recoveries", "lost", "saved"), "-")
        return {**row, "#": number, "job": one.job, "result": "unknown"}
    began = datetime.datetime.fromtimestamp(receipt.began_at).astimezone()
    return {
        "#": number,
        "job": one.job,
        "began": f"{began:%Y-%m-%d %H:%M}",
        "duration": format_span(receipt.duration_s),
        "steps": str(receipt.steps),
        "recoveries": str(receipt.recovery_count),
        "lost": format_span(receipt.costs.lost_s),
        "saved": format_work(receipt, receipt.costs.saved_rank_s) if receipt.recovery_count else "-",
        "result": receipt.outcome,
    }
