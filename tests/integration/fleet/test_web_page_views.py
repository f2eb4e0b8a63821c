"""The operators' page in a real Chromium: a controller, three nodes, a job that regroups; and 10,000 nodes."""

from __future__ import annotations

import os
import re
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bench.load.fleet import Controller, Fleet
from everstep.bearer_tokens import TokenRole, mint
from examples.demo.world import World, descendants
from tests.support.fleet.controllers import ControllerProcess
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.process_table import comm
from tests.support.processes.waiting import until
from tests.support.processes.warm_programs import WarmWorld
from tests.support.services.browser import axe_findings, chromium, link_of, require_axe, require_browser, watched
from tests.support.services.openid_provider import login_settings, openid_provider

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

VIEWS = {
    "/fleet": "Fleet",
    "/fleet/n1": "n1",
    "/job": "Jobs",
    "/job/gpt": "gpt",
    "/incident": "Incidents",
    "/policy": "Policy",
}
"""Titles by view."""
TRAIN = """
import time
import torch
import everstep

def train(run):
    torch.manual_seed(0)
    model = run.replicate(torch.nn.Linear(8, 8).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=1_000_000):
        loss = model(torch.ones(2, 8)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.report(loss=loss)
        print(f"<b>step</b> {step}", flush=True)
        time.sleep(0.25)

everstep.main(train)
"""
XID_79 = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
IS_IN_SIGHT = """element => {
  const box = element.getBoundingClientRect();
  const frame = element.closest(".scroll-x").getBoundingClientRect();
  return box.left >= frame.left && box.right <= frame.right && box.height < 30;
}"""
"""Whether an element of a table is on one line and needs no scrolling."""
NODES = 10_000


class Live:
    """A running fleet: its world, and links for people."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.was_struck = False
        """Whether a rank was killed: the fleet has an incident then."""

    def link(self, to: str = "/fleet", role: TokenRole = TokenRole.OPERATOR) -> str:
        return link_of(self.world.url, mint(self.world.secret, role, "olga"), to)

    def kill_rank(self) -> None:
        """Kill the rank of n1 with SIGKILL, once it has started."""
        launcher = self.world.nodes["n1"].launcher
        assert launcher is not None

        def rank() -> int:
            return next((pid for pid in descendants(launcher.pid) if comm(pid).startswith("everstep-rank")), 0)

        os.kill(until(rank, "the rank of n1"), signal.SIGKILL)
        self.was_struck = True


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    require_browser()
    with tempfile.TemporaryDirectory(prefix="ev-page-") as name:
        folder = Path(name)
        script = folder / "train.py"
        script.write_text(TRAIN)
        with WarmWorld(folder / "out", ["n1", "n2", "n3"]) as world:
            world.settings = f'journal_dir = "{folder / "journal"}"\n'
            world.settings += f'launcher_state_dir = "{world.folder / "state" / "everstep"}"\n'
            world.start_controller()
            world.boot_nodes()
            for node in (world.nodes["n1"], world.nodes["n2"]):
                flags = ["--nnodes", "2:2", "--nproc-per-node", "1", "--job", "gpt", "--standbys", "1"]
                flags += ["--local-addr", "127.0.0.1", "--agent-socket", str(node.agent_socket), "--die-with-parent"]
                node.join(["-m", "everstep_trainer.launch", *flags, str(script)])
            yield Live(world)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def wait_for_job(page: Any) -> None:
    """Wait until the job's view has its charts."""
    page.locator("#progress canvas").first.wait_for()
    page.locator(".page-head .chip", has_text="running").wait_for()


def test_fleet_view_shows_nodes_and_hides_the_token(live: Live, browser: Any) -> None:
    with watched(browser) as watch:
        page = watch.open(live.link())
        page.get_by_role("button", name="healthy 3").wait_for()
        assert page.url == f"{live.world.url}/#/fleet"
        assert "of 3 nodes serve" in page.locator(".sentence").inner_text()
        page.locator(".live.on").wait_for()
        for grouping in ("switch", "job", "rack"):
            page.get_by_role("button", name=grouping, exact=True).click()
        page.get_by_role("searchbox").fill("n2")
        page.locator(".grid").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="n2", exact=True).wait_for()
        page.get_by_text("NVIDIA").first.wait_for()
        page.keyboard.press("Escape")
        page.locator(".panel").wait_for(state="detached")
        page.reload()
        page.get_by_role("button", name="healthy 3").wait_for()


def test_typed_token_opens_the_page_and_a_wrong_one_does_not(live: Live, browser: Any) -> None:
    with watched(browser) as watch:
        page = watch.open(f"{live.world.url}/#/fleet")
        page.get_by_label("Token").fill("operator:olga:0000")
        page.get_by_role("button", name="Open").click()
        page.get_by_role("alert").wait_for()
        watch.complaints.clear()  # Chromium reports every answer 401
        page.get_by_label("Token").fill(mint(live.world.secret, TokenRole.VIEWER, "vera"))
        page.get_by_role("button", name="Open").click()
        page.get_by_role("button", name="healthy 3").wait_for()
        page.get_by_text("read only").wait_for()
        page.get_by_role("button", name="Leave").click()
        page.get_by_label("Token").wait_for()
        assert page.evaluate("sessionStorage.length") == 0


def paste(page: Any, link: str) -> None:
    """Put the fragment of a link into the address bar of an open page."""
    page.evaluate("fragment => { location.hash = fragment; }", urlsplit(link).fragment)


def test_pasted_links_are_followed_in_an_open_tab(live: Live, browser: Any) -> None:
    with watched(browser) as watch:
        page = watch.open(live.link())
        page.get_by_role("button", name="healthy 3").wait_for()
        paste(page, f"{live.world.url}/#/fleet/n2")
        page.get_by_role("heading", name="n2", exact=True).wait_for()
        page.locator(".who").get_by_text("operator", exact=True).wait_for()
        paste(page, live.link("/policy", TokenRole.VIEWER))
        page.locator(".who").get_by_text("read only").wait_for()
        assert page.title() == "Policy · Everstep"
        assert page.url == f"{live.world.url}/#/policy"
        paste(page, link_of(live.world.url, "operator:olga:0000", "/job"))
        page.get_by_role("alert").filter(has_text="The page stays open with the token of olga").wait_for()
        watch.complaints.clear()  # Chromium reports every answer 401
        page.locator(".who").get_by_text("read only").wait_for()
        assert page.url == f"{live.world.url}/#/job"
        watch.forget_shifts()  # views take each other's place


def test_latest_events_are_shown_at_once_after_a_load(live: Live, browser: Any) -> None:
    """The stream of events brings only those that come later."""
    with watched(browser) as watch:
        watch.page.route("**/v1/events/stream*", lambda route: None)  # never answered
        with watch.page.expect_response(re.compile(r"/v1/events\?.*newest")) as answer:
            page = watch.open(live.link())
        latest = [event["sentence"] for event in answer.value.json()["events"][:-13:-1]]
        page.locator(".latest tr").nth(len(latest) - 1).wait_for()
        shown = page.locator(".latest td:nth-child(3)").all_inner_texts()
        assert latest
        assert all(text.startswith(sentence) for text, sentence in zip(shown, latest, strict=True))


def test_charts_have_axes_of_steps_and_logarithms(live: Live, browser: Any) -> None:
    """A browser keeps the choice."""
    with watched(browser) as watch:
        page = watch.open(live.link("/job/gpt"))
        wait_for_job(page)
        page.get_by_role("figure", name="Loss over time, newest").wait_for()
        page.get_by_role("button", name="by step").click()
        page.get_by_label("logarithmic loss").check()
        page.get_by_role("figure", name="Loss by step, logarithmic, newest").locator("canvas").wait_for()
        page.get_by_role("figure", name="Step time by step, newest").locator("canvas").wait_for()
        page.reload()
        wait_for_job(page)
        page.get_by_role("figure", name="Loss by step, logarithmic, newest").wait_for()
        page.get_by_role("button", name="by time").click()
        page.get_by_role("figure", name="Throughput over time, newest").wait_for()
        ticks = page.evaluate("import('/web/progress.js').then(({ logTicks }) => [logTicks(1, 20), logTicks(1, 9e9)])")
        assert ticks[0] == [1, 2, 5, 10, 20]
        assert ticks[1] == [1, 100, 1e4, 1e6, 1e8]
        again = [{"step": 1, "loss": 9}, {"step": 2, "loss": 8}, {"step": 1, "loss": 7}, {"step": 3, "loss": 6}]
        kept = page.evaluate("rows => import('/web/progress.js').then((it) => it.lastOfEachStep(rows))", again)
        assert kept == again[2:]
        watch.forget_shifts()  # charts that are drawn anew


def test_person_logs_in_with_an_account_of_the_site(program_forks: ForkPool, tmp_path: Path, browser: Any) -> None:
    with openid_provider() as provider, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        redirect_uri = f"http://{address}/v1/login/callback"
        provider.redirect_uris = {redirect_uri}
        settings = login_settings(tmp_path, provider, redirect_uri)
        process = ControllerProcess(tmp_path, program_forks, arguments=("--settings", str(settings)))
        process.listen = address
        free.close()
        try:
            process.start()
            with watched(browser) as watch:
                page = watch.open(f"{process.url}/#/policy")
                page.get_by_role("link", name=f"Log in with 127.0.0.1:{urlsplit(provider.issuer).port}").click()
                page.locator(".who b", has_text="olga").wait_for()
                assert page.url == f"{process.url}/#/policy"
                page.get_by_text("operator", exact=True).wait_for()
                assert page.context.cookies() == []
                page.get_by_role("button", name="Leave").click()
                provider.agrees = False
                page.get_by_role("link", name="Log in with").click()
                page.get_by_role("heading", name="Not logged in").wait_for()
                assert "access_denied" in page.get_by_role("alert").inner_text()
                page.get_by_role("link", name="use a token").click()
                page.get_by_label("Token").wait_for()
                watch.complaints[:] = [line for line in watch.complaints if "401" not in line]
                assert all(url.startswith(provider.issuer) for url in watch.foreign)
                watch.foreign.clear()
        finally:
            process.end()


def urls_requested(source: Any, part: str) -> list[str]:
    """Return a list that fills with the URLs that a page or browser context requests and that contain ``part``."""
    urls: list[str] = []

    def note(request: Any) -> None:
        if part in request.url:
            urls.append(request.url)

    source.on("request", note)
    return urls


def test_order_holds_and_releases_a_node(live: Live, browser: Any) -> None:
    with watched(browser) as watch:
        page = watch.open(live.link("/fleet/n3"))
        page.get_by_role("button", name="Hold", exact=True).click()
        dialog = page.get_by_role("dialog")
        assert dialog.get_by_role("button", name="Hold").is_disabled()
        dialog.get_by_label("Reason").fill("fan to be \u202elooked at")  # which reverses the text behind it
        dialog.get_by_label("Reason").press("Enter")
        page.locator(".panel-head .state", has_text="held").wait_for()
        page.get_by_role("button", name="held 1").wait_for()
        page.locator(".panel .events").get_by_text(
            "olga ordered to hold n3: fan to be \ufffdlooked at"
        ).first.wait_for()
        page.get_by_role("button", name="Release", exact=True).click()
        dialog.get_by_label("Reason").fill("fan replaced")
        while dialog.count():  # refused where the node has changed since it was shown; the panel looks again by itself
            dialog.get_by_role("button", name="Release").click()
            page.locator("dialog .problem, main:not(:has(dialog))").first.wait_for(state="attached")
            watch.complaints.clear()
        page.get_by_role("button", name="Hold", exact=True).wait_for()
        watch.forget_shifts()  # the node's new reason takes another height


def test_job_view_marks_a_regroup_as_it_happens(live: Live, browser: Any) -> None:
    with watched(browser) as watch:
        page = watch.open(live.link("/job/gpt"))
        wait_for_job(page)
        before = page.locator("#recoveries a").count()
        seated = page.locator(".heat canvas")
        seated.wait_for()
        watch.check()
        live.kill_rank()
        page.locator("#recoveries a").nth(before).wait_for(timeout=60_000)
        page.locator("#events").get_by_text("resumed").nth(1).wait_for()
        page.locator("#costs .figure", has_text="Recoveries").locator("b", has_text=re.compile("[1-9]")).wait_for()
        page.locator("#checkpoints select").select_option(index=0)
        page.locator("#checkpoints .answer").wait_for()


def test_output_of_ranks_is_shown_while_on_screen(live: Live, browser: Any) -> None:
    with watched(browser, height=600) as watch:
        requested = urls_requested(watch.page, "/output?")
        page = watch.open(live.link("/job/gpt"))
        wait_for_job(page)
        ranks = page.locator("#output li")
        ranks.nth(1).get_by_text(re.compile(r"<b>step</b> \d+\n")).wait_for()
        assert ranks.nth(1).get_by_text(re.compile(r"n\d, \d+ s ago")).count() == 1
        page.locator("#events").scroll_into_view_if_needed()
        for _ in range(3):
            requested.clear()  # a request may have been under way
            with page.expect_response(re.compile("/v1/jobs/gpt$")):
                pass
        assert requested == []
        page.locator("#output").scroll_into_view_if_needed()
        page.get_by_role("button", name="rank 1").click()
        lines = page.get_by_role("region", name="Last lines of rank 1")
        lines.get_by_text(re.compile(r"\d\d:\d\d:\d\d <b>step</b> \d+\n")).wait_for()
        newest = lines.inner_text()
        until(lambda: lines.inner_text() != newest, "newer lines are shown")
        assert lines.evaluate("element => element.scrollHeight - element.scrollTop - element.clientHeight") < 2
        assert any(url.endswith("?rank=1&lines=50") for url in requested)
        watch.forget_shifts()  # of the rows below the one that was opened


def test_output_of_ranks_is_not_shown_to_viewers(live: Live, browser: Any) -> None:
    with watched(browser) as watch:
        requested = urls_requested(watch.page, "/output?")
        page = watch.open(live.link("/job/gpt", TokenRole.VIEWER))
        wait_for_job(page)
        page.locator("#output").get_by_text("Only operators may read the output here").wait_for()
        page.locator("#output code", has_text="everstep logs gpt").wait_for()
        assert requested == []


ADVICE_NOW = """async () => {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem("everstep.token")}` };
  const { needs = [] } = await (await fetch("/v1/status", { headers })).json();
  return needs.map((need) => need.advice);
}"""
"""What needs a person, as the controller lists it."""


def test_incident_is_shown_and_downloaded(live: Live, browser: Any, tmp_path: Path) -> None:
    if not live.was_struck:
        live.kill_rank()
    with watched(browser) as watch:
        page = watch.open(live.link("/incident"))
        row = page.locator("a.row", has_text="rank").filter(has_text="stepping after").first
        row.click()
        page.locator("#timeline svg").wait_for()
        page.locator("#trail li", has_text="resumed").wait_for()
        card = page.locator(".card").inner_text()
        assert re.search(r"n1 \(rank [01]\), .*job gpt", card)
        assert re.search(r"What was done\s.*resumed from .*What to do\s", card, re.DOTALL)
        assert all(advice in card for advice in page.evaluate(ADVICE_NOW) or ["Nothing: no person is needed."])
        with page.expect_download() as download:
            page.get_by_role("button", name="Download as HTML").click()
        kept = tmp_path / "incident.html"
        download.value.save_as(kept)
    with watched(browser) as watch:
        page = watch.open(kept.as_uri())
        page.locator("svg").first.wait_for()
        assert "rank" in page.locator("#trail").inner_text()
        assert "What to do" in page.locator(".card").inner_text()
        assert page.locator("script, a, button, link").count() == 0
        assert page.evaluate("getComputedStyle(document.querySelector('.trail')).borderLeftStyle") == "solid"


def test_finding_shows_rule_evidence_and_ladder(live: Live, browser: Any) -> None:
    with watched(browser) as watch:
        page = watch.open(live.link("/fleet/n3"))
        page.locator(".panel .facts").wait_for()
        watch.check()
        with live.world.nodes["n3"].kernel_log.open("a") as log:
            log.write(XID_79)
        finding = page.locator(".panel .finding", has_text="gpu.xid 79").first
        finding.wait_for()
        assert "Source: " in finding.inner_text()
        page.locator(".panel .verdict").first.wait_for()
        page.locator(".panel .ladder .now").wait_for()
        page.locator(".panel .verdict").first.get_by_role("link").click()
        card = page.locator(".card")
        card.get_by_text("everstep node show n3").wait_for()
        card.get_by_text("n3 waits for a person: its next step is manual: reboot node").wait_for()
        text = card.inner_text()
        assert "n3 (GPU 0)" in text
        assert re.search(r"What was done\s+\+", text)
        assert "no person is needed" not in text
        watch.forget_shifts()  # what is new stands above what is old


def test_viewer_sees_gauges_of_gpus_and_no_order(live: Live, browser: Any) -> None:
    with watched(browser) as watch:
        page = watch.open(live.link("/fleet/n2", TokenRole.VIEWER))
        page.get_by_text("Orders need a token with the operator role").wait_for()
        assert page.locator(".panel button:not(.close)").count() == 0
        gpu = page.locator(".panel .gauges tbody tr").first
        gpu.wait_for(timeout=60_000)
        assert "°C" in gpu.inner_text()
        assert "W" in gpu.inner_text()
        live.world.nodes["n2"].set_gpu(throttle_reasons=0x1 | 0x4 | 0x20)  # idle, power cap, software thermal
        throttled = gpu.locator("td").last
        throttled.get_by_text("software thermal").wait_for(timeout=60_000)
        assert re.split(r",?\s*\n", throttled.inner_text()) == ["power cap", "software thermal"]
        assert all(badge.evaluate(IS_IN_SIGHT) for badge in throttled.locator("span").all())
        live.world.nodes["n2"].set_gpu(throttle_reasons=0x1)
        page.locator(".panel .gauges td:last-child", has_text="–").wait_for(timeout=60_000)
        watch.forget_shifts()  # they come once the agent has sent them


@pytest.mark.parametrize("width", [1400, 420])
def test_axe_finds_nothing_in_any_view(live: Live, browser: Any, width: int) -> None:
    """Each view as a person sees it, with a form of the API page and a dialog open."""
    script = require_axe()
    if not live.was_struck:
        live.kill_rank()  # for the view of an incident
    found: dict[str, list[str]] = {}
    with watched(browser, width) as watch:
        page = watch.open(f"{live.world.url}/#/fleet")
        page.get_by_label("Token").wait_for()
        found["log-in"] = axe_findings(page, script)
        page.goto(f"{live.world.url}/docs")
        for route in ("status", "issue_credential"):
            page.locator(f"#{route} > summary").click()
            page.locator(f"#{route} pre").wait_for()
        found["docs"] = axe_findings(page, script)
        page = watch.open(live.link())
        page.locator(".sentence").wait_for()
        for view, title in [*VIEWS.items(), ("/fleet/n3", "n3")]:
            page.evaluate("view => { location.hash = view; }", view)
            page.wait_for_function("title => document.title === title", arg=f"{title} · Everstep")
            page.locator(".skeleton").first.wait_for(state="detached")
            found[view] = axe_findings(page, script)
        page.get_by_role("button", name="Readmit").or_(page.get_by_role("button", name="Hold")).first.click()
        page.get_by_role("dialog").wait_for()
        found["dialog"] = axe_findings(page, script)
        page.keyboard.press("Escape")
        page.evaluate("location.hash = '#/incident'")
        page.locator("a.row").first.click()
        page.locator("#trail li").first.wait_for()
        found["incident"] = axe_findings(page, script)
        watch.forget_shifts()  # views take each other's place
    assert {view: kinds for view, kinds in found.items() if kinds} == {}


def test_deferred_eviction_makes_the_fleet_page_red(live: Live, browser: Any) -> None:
    """The job needs both of its nodes, so n1 serves with a double-bit error. The last test of this fleet."""
    with watched(browser) as watch:
        page = watch.open(live.link())
        page.locator(".sentence").wait_for()
        with live.world.nodes["n1"].kernel_log.open("a") as log:
            log.write(XID_79.replace("79,", "48,"))
        page.get_by_role("button", name="faulty 1").wait_for()
        page.locator(".sentence.level-bad", has_text="a person.").wait_for()
        need = page.locator(".concerns li", has_text="n1 serves with")
        assert need.locator(".why").inner_text().startswith("n1 serves with gpu.xid/48 on GPU ")
        assert "job gpt needs 2 nodes and 1 would be left" in need.inner_text()
        assert need.locator("code").inner_text() == "everstep node evict n1 --reason WHY"
        assert page.get_by_role("button", name="healthy 3").count() == 0
        watch.forget_shifts()  # a new need stands above the nodes


@pytest.mark.nightly
def test_ten_thousand_nodes_are_shown_and_scroll(browser: Any, tmp_path: Path) -> None:
    """The canvas stays small, and holds the first and the last node at either end of the grid."""
    controller = Controller(
        tmp_path,
        "",
        "heartbeat_interval_s = 30\n"
        "[policy.liveness]\nsuspect_after_s = 90\nsuspect_after_max_s = 150\nlost_after_s = 200\n",
    )
    try:
        fleet = Fleet(controller, NODES, jobs=1)
        try:
            fleet.all("beat", interval_s=30.0)
            fleet.open()
            token = mint(controller.secret_file.read_bytes().strip(), TokenRole.OPERATOR, "olga")
            with watched(browser) as watch:
                page = watch.open(link_of(f"http://{controller.address}", token))
                page.get_by_role("button", name=f"healthy {NODES:,}").wait_for(timeout=120_000)
                controller.client.hold("n009999", reason="a test")
                page.get_by_role("button", name="held 1").wait_for()
                page.locator(".troubled", has_text="n009999").wait_for()
                grid = page.locator(".grid")
                assert grid.evaluate("element => element.scrollHeight / element.clientHeight") > 1.2
                assert page.locator(".grid canvas").evaluate("canvas => canvas.height") < 4000
                assert grid.evaluate("element => element.querySelectorAll('*').length") < 20
                grid.evaluate("element => { element.scrollTop = element.scrollHeight; }")
                box = grid.bounding_box()
                assert box is not None
                page.wait_for_function("document.querySelector('.grid canvas').style.transform !== 'translateY(0px)'")
                grid.focus()
                page.keyboard.press("End")
                page.keyboard.press("Enter")
                page.get_by_role("heading", name="n009999").wait_for()
        finally:
            fleet.end()
    finally:
        controller.end()
