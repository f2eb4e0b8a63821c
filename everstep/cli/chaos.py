"""``everstep chaos``: bring about a fault in one's own running job, and report how the job recovered."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from everstep.chaos.experiment import LASTING_S, run_experiment
from everstep.chaos.faults import Fault
from everstep.chaos.recovery import ChaosReport, FaultReport, JobWatch, Progress, RegroupOutcome
from everstep.chaos.targets import LocalNode, find_nodes, nodes_of_run
from everstep.cli.context import (
    ConnectionOptions,
    Json,
    Printer,
    connected_client,
    console,
    get_function,
    local_runs,
    reporting_errors,
    show,
    state_dir,
)
from everstep.client.exchange import path
from everstep.errors import ConfigurationError
from everstep.host.processes import read_processes
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import JobState

PAGE_WIDTH = 120  # characters of the report as a web page


def chaos(
    context: typer.Context,
    fault: Annotated[Fault, typer.Argument(help="The fault.")],
    job: Annotated[str, typer.Option(help="Name of the job. Default: the only one on this machine.")] = "",
    rank: Annotated[int | None, typer.Option(help="The rank, or a rank of the node. Default: at random.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Duration of slow (20) and partition (10).")] = None,
    count: Annotated[int, typer.Option(min=1, help="Number of faults, each after the last one's recovery.")] = 1,
    every_s: Annotated[float, typer.Option("--every", min=0.0, help="Seconds from a recovery to the next fault.")] = 10,
    timeout_s: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for a recovery.")] = 120.0,
    yes: Annotated[bool, typer.Option("--yes", help="Strike a fleet's job, too, or one that will pause.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the report as a web page.")] = None,
    as_json: Json = False,
) -> None:
    """Bring about a fault in your own running job on this machine, and report how the job recovers.

    kill: SIGKILL to a rank. hang: a rank stops. slow: a rank runs for a quarter of the time. flip: one bit of a rank's
    parameters changes. partition: the node's agent stops, as if cut off. node: SIGKILL to all of a node.

    The exit status is 1 if the job did not recover.
    """
    with reporting_errors():
        if seconds is not None and fault not in LASTING_S:
            raise ConfigurationError(f"--seconds has no meaning for {fault}, which happens at once")
        name = job or _only_job(find_nodes(read_processes()))
        context.obj = access = _access(context.obj, name).resolved(os.environ)
    reports: list[FaultReport] = []
    try:
        with connected_client(context) as client:
            while len(reports) < count:
                if reports:
                    time.sleep(every_s)
                report = run_experiment(
                    fault,
                    JobWatch(get_function(client), path("jobs", name), SYSTEM_CLOCK),
                    nodes_of_run(find_nodes(read_processes()), name, access.controller),
                    rank=rank,
                    seconds=LASTING_S.get(fault, 0.0) if seconds is None else seconds,
                    timeout_s=timeout_s,
                    confirmed=yes,
                )
                reports.append(report)
                if not as_json:
                    console.print(view(report))
                if not report.recovered or report.state is not JobState.RUNNING:
                    break
    finally:  # also tell of the faults before one that could not be brought about
        if reports:
            result = ChaosReport(recovered=all(report.recovered for report in reports), faults=tuple(reports))
            if as_json:
                show(result, True, "")
            if html is not None:
                _write_page(html, Group(*map(view, reports)))
    if not result.recovered:
        raise typer.Exit(1)


def _only_job(nodes: list[LocalNode]) -> str:
    """Return the job that runs here. Raises ConfigurationError if there is none, or there are several."""
    names = sorted({node.job for node in nodes})
    if len(names) == 1:
        return names[0]
    if not names:
        raise ConfigurationError("no job of yours runs on this machine: start one with everstep-launch")
    raise ConfigurationError(f"several jobs run on this machine: choose one with --job: {', '.join(names)}")


def _access(given: ConnectionOptions, job: str) -> ConnectionOptions:
    """Return the connection: as given, else to the private controller of the job's run."""
    if given.controller or given.run or all(run.job != job for run in local_runs(state_dir(os.environ))):
        return given
    return msgspec.structs.replace(given, run=job)


def _write_page(file: Path, content: RenderableType) -> None:
    page = Printer(record=True, file=io.StringIO(), width=PAGE_WIDTH)
    page.print(content)
    try:
        page.save_html(str(file))
    except OSError as error:
        raise ConfigurationError(f"cannot write the report to {file}: {error}") from error


def view(report: FaultReport) -> RenderableType:
    """Return a report for people."""
    rows = Table.grid(padding=(0, 2))
    rows.add_row("fault", f"{report.action}, at step {report.before.step} of job {report.job}")
    found = report.detection
    rows.add_row(
        "detected", "no event tells of it" if found is None else f"after {found.after_s:.2f} s: {found.sentence}"
    )
    for regroup in report.regroups:
        for name, text in _regroup_rows(regroup):
            rows.add_row(name, text)
    if report.during is not None:
        speeds = (report.before.step_s, report.during.step_s, report.after.step_s)
        rows.add_row("step time", "{:.3f} s before, {:.3f} s during, {:.3f} s after".format(*speeds))
    rows.add_row("loss", f"{_loss(report.before)} before, {_loss(report.after)} after")
    for sentence in report.verdicts or ("no node was judged",):
        rows.add_row("verdict", sentence)
    style = "bold green" if report.recovered else "bold red"
    return Group(Text(f"chaos {report.fault}", style="bold"), rows, Text(report.conclusion, style=style))


def _regroup_rows(regroup: RegroupOutcome) -> list[tuple[str, str]]:
    phases = ", ".join(f"{name} {seconds:.3f}" for name, seconds in regroup.phases_s.items())
    resumed = "not all ranks have resumed"
    if regroup.duration_s is not None:
        resumed = f"{regroup.duration_s:.2f} s until the first step of all {regroup.world_size} ranks"
    source = "from scratch" if regroup.restored is None else f"step {regroup.restored.step}"
    skipped = "unknown" if regroup.steps_skipped is None else str(regroup.steps_skipped)
    lost = "; no sample is lost" if regroup.steps_skipped == 0 else ""
    return [
        ("decided", f"after {regroup.decided_after_s:.2f} s: generation {regroup.generation}: {regroup.sentence}"),
        ("recovered", f"{resumed} ({phases})" if phases else resumed),
        ("restored", f"{source}; steps computed again: {regroup.steps_repeated}, skipped: {skipped}{lost}"),
    ]


def _loss(progress: Progress) -> str:
    loss = "not reported" if progress.loss is None else f"{progress.loss:.4f}"
    return f"{loss} at step {progress.step}"
