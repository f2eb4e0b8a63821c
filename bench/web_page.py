"""The operators' web page in Chromium: first paint, scrolling, and what open pages cost the controller.

    python -m bench.web_page [--only paint|scroll|cost] [--nodes 10000] [--fleet 12500] [--pages 50] [--seconds 60]
                             [--quick] [--json FILE]

First paint is measured on the private controller of a launcher, in a new browser profile each time. Frames are
measured while the grid of --nodes simulated nodes scrolls from end to end. The cost is the processor time of a
controller of --fleet nodes with --pages pages open, less its processor time without any; an operator gives an order
every ten seconds meanwhile, so that the pages have something to show. The simulated nodes beat every 20 s, which leaves
this machine's processor to the browser. It needs playwright, and Debian's chromium (--browser).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console

from bench.fleet_load import fleet_of
from bench.load.fleet import Controller
from bench.table import Row, finish, parser_of
from everstep.bearer_tokens import TokenRole, mint

CHROMIUM = "/usr/bin/chromium"
BEAT_S = 20.0
PAGES_PER_VIEWER = 5
"""Below the limit of event streams that one identity may read."""
ORDER_EVERY_S = 10.0
SCRIPT = """
import time
import torch
import everstep

def train(run):
    model = run.replicate(torch.nn.Linear(8, 8).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=1_000_000):
        loss = model(torch.ones(2, 8)).pow(2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        time.sleep(0.2)

everstep.main(train)
"""
SCROLL = """async (seconds) => {
  const grid = document.querySelector(".grid");
  const frames = [];
  const end = performance.now() + 1000 * seconds;
  let last = await new Promise(requestAnimationFrame);
  let step = 60;
  while (performance.now() < end) {
    grid.scrollTop += step;
    if (grid.scrollTop <= 0 || grid.scrollTop + grid.clientHeight >= grid.scrollHeight - 1) step = -step;
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
  }
  return frames;
}"""
console = Console(stderr=True)


@contextmanager
def private_run() -> Iterator[str]:
    """A launcher with two ranks that train for ever; yields the link that `everstep open` prints."""
    with tempfile.TemporaryDirectory(prefix="ev-page-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        log = folder / "launcher.log"
        command = [sys.executable, "-m", "everstep_trainer.launch", "--nproc-per-node", "2", "--job", "page"]
        command += ["--state-dir", str(folder / "state"), "train.py"]
        with log.open("wb") as output:
            launcher = subprocess.Popen(command, cwd=folder, stderr=output, stdout=output, start_new_session=True)
        try:
            opening = [str(Path(sys.executable).with_name("everstep")), "open", "page"]
            opening += ["--state-dir", str(folder / "state")]
            while (answer := subprocess.run(opening, capture_output=True, text=True)).returncode:
                if launcher.poll() is not None:
                    raise SystemExit(log.read_text())
                time.sleep(0.2)
            yield answer.stdout.strip()
        finally:
            with suppress(ProcessLookupError):
                launcher.send_signal(signal.SIGTERM)
            launcher.wait(60)


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def first_paint(browser: Browser, rounds: int) -> list[Row]:
    """Milliseconds from the navigation to the first paint, and to the whole first view."""
    paints, views = [], []
    with private_run() as link:
        for _ in range(rounds + 1):
            context = browser.new_context()
            page = context.new_page()
            page.goto(link)
            page.locator("#progress canvas").first.wait_for(timeout=60_000)
            views.append(float(page.evaluate("performance.now()")))
            paints.append(float(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")))
            context.close()
    del paints[0], views[0]  # the browser's own first page
    return [
        Row("first paint, private controller", statistics.median(paints) / 1000, "s", floor=1.0, aim=0.3),
        Row("job with its charts, private controller", statistics.median(views) / 1000, "s"),
    ]


def link_to(controller: Controller, role: TokenRole, name: str) -> str:
    token = mint(controller.secret_file.read_bytes().strip(), role, name)
    return f"http://{controller.operators_address}/#{urlencode({'token': token, 'to': '/fleet'})}"


def wait_for_nodes(page: Page, nodes: int) -> None:
    """Wait until the page knows every node."""
    page.get_by_role("button", name=f"healthy {nodes:,}").wait_for(timeout=120_000)


def scrolling(browser: Browser, nodes: int, seconds: float) -> list[Row]:
    """Milliseconds between frames while the grid scrolls."""
    with fleet_of(nodes, BEAT_S, "") as (fleet, _):
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.goto(link_to(fleet.controller, TokenRole.VIEWER, "vera"))
        wait_for_nodes(page, nodes)
        page.evaluate(SCROLL, 1.0)
        frames = [float(one) for one in page.evaluate(SCROLL, seconds)]
        page.close()
    name = f"frame while scrolling {nodes:,} nodes"
    return [
        Row(f"{name}, median", statistics.median(frames), "ms", floor=33.0, aim=17.0),
        Row(f"{name}, 95th percentile", percentile(frames, 0.95), "ms", floor=33.4, aim=17.0),
        Row(f"{name}, longest", max(frames), "ms"),
    ]


def orders(controller: Controller, seconds: float) -> None:
    """Hold and release nodes until the time is over."""
    end = time.perf_counter() + seconds
    names = [one["node"] for one in controller.get("/v1/nodes?limit=100")["nodes"]]
    for count in range(1_000_000):
        left = end - time.perf_counter()
        if left <= 0:
            return
        time.sleep(min(left, ORDER_EVERY_S))
        controller.post(
            f"/v1/nodes/{names[count // 2 % len(names)]}/{('hold', 'release')[count % 2]}", reason="a bench"
        )


def processor_share(controller: Controller, seconds: float) -> float:
    """Cores that the controller uses while orders are given."""
    before, at = controller.cpu_s(), time.perf_counter()
    orders(controller, seconds)
    return (controller.cpu_s() - before) / (time.perf_counter() - at)


def open_pages(browser: Browser, nodes: int, pages: int, seconds: float) -> list[Row]:
    """Cores of the controller with and without pages."""
    with fleet_of(nodes, BEAT_S, "") as (fleet, _):
        time.sleep(BEAT_S)
        without = processor_share(fleet.controller, seconds)
        contexts = []
        for number in range(pages):  # each as in a browser of its own: tabs of one browser share a stream
            context = browser.new_context(viewport={"width": 1400, "height": 900})
            contexts.append(context)
            page = context.new_page()
            page.goto(link_to(fleet.controller, TokenRole.VIEWER, f"viewer-{number // PAGES_PER_VIEWER}"))
            page.locator(".live.on").wait_for(timeout=120_000)
            page.get_by_role("button", name=re.compile(r"^healthy [\d,]{3,}")).wait_for(timeout=120_000)
        console.log(f"{pages} pages are open")
        time.sleep(BEAT_S)
        beside = processor_share(fleet.controller, seconds)
        for context in contexts:
            context.close()
    return [
        Row(f"controller of {nodes:,} nodes, no page", without, "cores"),
        Row(f"controller of {nodes:,} nodes, {pages} pages", beside, "cores"),
        Row(f"cost of {pages} pages", max(0.0, beside - without), "cores", floor=0.1, aim=0.03),
    ]


def page_bytes() -> list[Row]:
    """Bytes of everything that is served, with and without compression."""
    from everstep_controller.api import web_page

    files = [web_page.load(name) for name in web_page.FILES if not name.startswith("docs.")]
    return [
        Row("bytes of the page", sum(len(one.plain) for one in files) / 1000, "kB", floor=300.0, aim=250.0),
        Row("bytes of the page, as sent", sum(len(one.gzipped) for one in files) / 1000, "kB"),
    ]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("web_page", __doc__)
    parser.add_argument("--browser", default=CHROMIUM, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=10, help="first paints (default 10)")
    parser.add_argument("--nodes", type=int, default=10_000, help="of the grid that scrolls")
    parser.add_argument("--fleet", type=int, default=12_500, help="nodes of the controller with open pages")
    parser.add_argument("--pages", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement of cost")
    parser.add_argument("--only", choices=("paint", "scroll", "cost"), help="measure this part alone")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.fleet, options.pages, options.seconds = 3, 2_000, 5, 20.0
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    if not Path(options.browser).exists():
        console.log(f"there is no {options.browser}: install Debian's chromium, or name a browser with --browser")
        return 0 if options.quick else 2  # make bench goes on
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = page_bytes()
    launch: dict[str, Any] = {"executable_path": options.browser, "args": ["--no-sandbox"]}
    with sync_playwright() as playwright:
        parts: dict[str, Callable[[Browser], list[Row]]] = {
            "paint": lambda browser: first_paint(browser, options.rounds),
            "scroll": lambda browser: scrolling(browser, options.nodes, 5.0),
            "cost": lambda browser: open_pages(browser, options.fleet, options.pages, options.seconds),
        }
        for name, measure in parts.items():
            if options.only not in (None, name):
                continue
            browser = playwright.chromium.launch(**launch)
            try:
                rows += measure(browser)
            finally:
                browser.close()
            console.log(json.dumps({row.name: row.value for row in rows}))
    return finish("The web page in Chromium", rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
