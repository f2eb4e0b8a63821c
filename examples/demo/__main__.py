"""``python -m examples.demo``: see ``examples/demo/__init__.py``."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from everstep.client import Client
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.operator import Event
from examples.demo import faults
from examples.demo.report import write_report
from examples.demo.stage import JOB, RANKS, Stage
from examples.demo.story import Run
from examples.demo.verify import Verified, verify
from examples.demo.view import View
from examples.demo.watch import Watch
from examples.demo.world import Node, World, wait_for

NAMES = ["n1", "n2", "n3", "n4", "n5"]
STEPS = {("ddp", True): 500, ("ddp", False): 700, ("fsdp2", True): 300, ("fsdp2", False): 350}
"""By layout and speed. Shards meet in a collective for each block, so on a CPU their steps take two to three times as
long."""
SHORTEST_S = 35.0
"""The training takes at least this long, so that a fast machine is not done before the last fault has struck."""
FOUND = ("rank.", "node.", "finding.", "corruption.", "launcher.left", "user_error")
DECIDED = ("generation", "verdict.", "job.")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description="A real training run on this machine, through six kinds of fault."
    )
    parser.add_argument("--fast", action="store_true", help="a smaller model and fewer steps: a minute or two")
    parser.add_argument("--layout", choices=["ddp", "fsdp2"], default="ddp", help="replicas that vote, or shards")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where report.html and summary.json go")
    parser.add_argument("--steps", type=int, help="train this many steps")
    parser.add_argument("--without-reference", action="store_true", help="leave the undisturbed run out")
    parsed = parser.parse_args(argv)
    parsed.steps = parsed.steps or STEPS[parsed.layout, parsed.fast]
    return parsed


def training(options: argparse.Namespace) -> list[str]:
    """The script and its arguments; the same for the run and for the uninterrupted one."""
    arguments = ["--layout", options.layout, "--steps", str(options.steps)]
    return ["-m", "examples.demo.train", *arguments, *(["--fast"] if options.fast else [])]


def launcher(world: World, options: argparse.Namespace, node: Node) -> list[str]:
    """The command that joins ``node`` to the job."""
    flags = ["--nnodes", "3:4", "--nproc-per-node", "1", "--job", JOB, "--standbys", "1", "--die-with-parent"]
    flags += ["--local-addr", "127.0.0.1", "--agent-socket", str(node.agent_socket), "--join-wait-s", "30"]
    flags += ["--hang-threshold-s", "1.0", "--digest-interval", "1"]
    return ["-m", "everstep_trainer.launch", *flags, *training(options), "--pace", f"{SHORTEST_S / options.steps:.3f}"]


def uninterrupted(world: World, options: argparse.Namespace, console: Console) -> Run:
    """The same training under torchrun with nothing happening to it."""
    folder = options.out / "uninterrupted"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.jsonl"):
        old.unlink()
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--standalone", *training(options)]
    environment = {"DEMO_STEPS": str(folder.resolve()), "DEMO_NODE": "reference", "OMP_NUM_THREADS": "1"}
    process = world.start("uninterrupted", [*command], {**environment, "GLOO_SOCKET_IFNAME": "lo"})
    with console.status(f"first the same {options.steps} steps with nothing happening to them ...") as status:
        while process.poll() is None:
            done = len(Run.read(folder).finished)
            status.update(f"first the same training with nothing happening to it: step {done} of {options.steps}")
            time.sleep(0.5)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Run.read(folder)


@contextmanager
def drawn(view: View, watch: Watch, stage: Stage, console: Console) -> Iterator[None]:
    """Draws the view four times a second, from a thread, until the block ends."""
    done = threading.Event()
    with Live(view.render(SYSTEM_CLOCK.wall()), console=console, refresh_per_second=4, transient=False) as live:

        def draw() -> None:
            while not done.wait(0.25):
                view.nodes, view.roster, view.step = watch.nodes, watch.roster, stage.step()
                view.job = watch.job.summary if watch.job else None
                live.update(view.render(SYSTEM_CLOCK.wall()))

        thread = threading.Thread(target=draw, name="demo-view", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join(5)


def assemble(stage: Stage) -> None:
    """Boots all nodes, forms the job on four of them, and lets the fifth wait as a spare."""
    world = stage.world
    stage.view.title = "the fleet assembles"
    world.boot_nodes()
    *members, spare = world.nodes.values()
    for node in members:
        node.join(stage.command(node))
    stage.wait_world(RANKS)
    spare.join(stage.command(spare))
    stage.wait_spares(1)
    stage.wait_step(10)


def play(stage: Stage, layout: str) -> None:
    """The whole story. Each fault waits for what it needs: a slow machine recovers in its own time."""
    stage.ready()
    faults.rank_killed(stage)
    stage.ready()
    faults.rank_hangs(stage)
    stage.ready(spares=1)
    killed = stage.node_of(2)
    faults.node_killed(stage)
    stage.ready()
    evicted = stage.node_of(1)
    faults.xid_79(stage)
    faults.comes_back_and_grows(stage, killed, evicted)
    stage.ready(spares=1)
    faults.slot_rots(stage)
    if layout == "ddp":
        stage.ready(spares=1)
        faults.parameter_flips(stage)
    stage.ready()
    faults.controller_killed(stage)
    stage.view.title = "the rest of the training, undisturbed"
    stage.wait_step(stage.steps)
    for node in stage.world.nodes.values():
        if node.launcher is not None and node.launcher.poll() is None:
            wait_for(lambda node=node: node.launcher.poll() is not None, f"the launcher on {node.name} ends")  # type: ignore[misc]


def conclude(stage: Stage, reference: Run, options: argparse.Namespace, started_at: float, problem: str) -> int:
    """Writes report and summary; returns the exit status."""
    run = Run.read(stage.world.steps)
    lost = run.lost()
    problems = [problem] if problem else []
    for fault in stage.faults:
        fault.steps_lost = lost[fault.generation] if fault.generation else 0
        if not fault.ok:
            problems.append(f"{fault.title}: {fault.problem or 'did not end as it must'}")
    verified: Verified | None = None
    try:
        verified = verify(run, reference, options.steps)
        problems += verified.problems
    except ValueError as error:
        problems.append(str(error))
    wall_s = SYSTEM_CLOCK.wall() - started_at
    lines = [msgspec.json.encode(event) for event in stage.watch.events]
    (options.out / "events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    timeline = [(event.at - started_at, event.kind, event.sentence) for event in stage.watch.events]
    write_report(
        options.out / "report.html",
        layout=options.layout,
        run=run,
        reference=reference,
        faults=stage.faults,
        verified=verified,
        timeline=timeline,
        problems=problems,
        wall_s=wall_s,
    )
    summary = {
        "ok": not problems,
        "layout": options.layout,
        "problems": problems,
        "faults": [fault.summary() for fault in stage.faults],
        "loss": {
            "final": verified.final if verified else None,
            "uninterrupted_final": verified.uninterrupted_final if verified else None,
            "max_abs_difference": verified.max_abs_difference if verified else None,
            "exact_through_step": verified.exact_through if verified else None,
        },
        "samples": {
            "seen": verified.seen if verified else None,
            "repeated": verified.repeated if verified else None,
            "skipped": verified.skipped if verified else None,
        },
        "steps": options.steps,
        "generations": stage.watch.generation,
        "wall_s": round(wall_s, 2),
    }
    (options.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return int(bool(problems))


def main(argv: list[str]) -> int:
    options = parse(argv)
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    started_at = SYSTEM_CLOCK.wall()
    with World(options.out, NAMES) as world:
        reference = Run() if options.without_reference else uninterrupted(world, options, console)
        world.start_controller()
        view = View(options.steps, SYSTEM_CLOCK.wall())

        def on_event(event: Event) -> None:
            kind = "decided" if event.kind.startswith(DECIDED) else "found" if event.kind.startswith(FOUND) else ""
            kind = "restored" if event.kind == "resumed" else kind
            if kind:
                view.say(event.at, kind, event.sentence)

        watch = Watch(lambda: Client(world.url, world.operator_token), JOB, on_event)
        stage = Stage(world, watch, view, lambda node: launcher(world, options, node), options.steps)
        watch.start()
        problem = ""
        try:
            with drawn(view, watch, stage, console):
                assemble(stage)
                play(stage, options.layout)
        except TimeoutError as error:
            problem = f"waited in vain for: {error}"
        finally:
            watch.close()
        status = conclude(stage, reference, options, started_at, problem)
    console.print(f"[{'green' if status == 0 else 'red'}]{'all well' if status == 0 else 'not as it must be'}[/]")
    console.print(f"report: {options.out / 'report.html'}   summary: {options.out / 'summary.json'}")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
