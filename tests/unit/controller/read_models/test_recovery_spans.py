"""Recoveries as spans: built from rows of the event log alone, and received by a collector."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.errors import ConfigurationError
from everstep.wire.v1.training import FindingRaised
from everstep_controller.read_models import otlp_traces
from everstep_controller.read_models.otlp_traces import TraceExporter, trace_id
from everstep_controller.read_models.recovery_spans import MAX_TRACES, RecoverySpanBuilder, RecoverySpans
from everstep_controller.store.rows import EventLogRow
from tests.support.fleet.controllers import InProcess
from tests.support.fleet.in_process_fleet import FELL_OFF, resume, running_job

PHASES = {"abort_s": "0.1", "rendezvous_s": "0.2", "restore_s": "0.4", "first_step_s": "0.1"}


def row(kind: str, at: float, *, trace: str = "ab12", node: str = "", **detail: str) -> EventLogRow:
    entry = EventLogRow(id=1, at=at, kind=kind, sentence=kind, node=node, trace=trace, detail=json.dumps(detail))
    return msgspec.structs.replace(entry, job="llama", generation=2) if kind in ("generation", "resumed") else entry


def eviction() -> list[EventLogRow]:
    return [
        row("finding", 100.2, node="n3", rule="gpu.xid.79", seen_at="100.0"),
        row("verdict.evict", 100.3, node="n3", verdict="n3-1"),
        row("generation", 100.3, reason="node_evicted"),
        row("resumed", 101.3, took_s="1.0", restored="1/40", slowest_rank="5", **PHASES),
    ]


def spans_of(rows: list[EventLogRow]) -> list[RecoverySpans]:
    found: list[RecoverySpans] = []
    RecoverySpanBuilder(found.append).record(rows)
    return found


def test_parts_follow_one_another_from_signal_to_first_step() -> None:
    (recovery,) = spans_of(eviction())
    assert (recovery.whole.start, recovery.whole.end) == (100.0, 101.3)
    assert [part.name for part in recovery.parts] == [
        "signal",
        "decision",
        "directives",
        "regroup",
        "restore",
        "first_step",
    ]
    starts = [part.start for part in recovery.parts]
    assert starts == pytest.approx([100.0, 100.2, 100.3, 100.5, 100.8, 101.2])
    assert [part.end for part in recovery.parts] == [*starts[1:], 101.3]


def test_every_part_names_node_rule_verdict_and_version() -> None:
    (recovery,) = spans_of(eviction())
    for span in (recovery.whole, *recovery.parts):
        assert span.attributes["everstep.node"] == "n3"
        assert span.attributes["everstep.rule"] == "gpu.xid.79"
        assert span.attributes["everstep.verdict"] == "n3-1"
        assert span.attributes["everstep.version"] == "1/40"
        assert span.attributes["everstep.run"] == "llama"
    assert recovery.parts[3].attributes["everstep.phase.rendezvous_s"] == 0.2


def test_first_start_of_a_run_is_no_recovery() -> None:
    formed = [row("generation", 1.0, reason="formed"), row("resumed", 2.0, took_s="1.0")]
    assert spans_of(formed) == []


def test_remembered_traces_are_bounded() -> None:
    builder = RecoverySpanBuilder(lambda _: None)
    builder.record([row("finding", 1.0, trace=f"{number:x}") for number in range(3 * MAX_TRACES)])
    builder.record([row("finding", 1.0)] * 1000)
    assert len(builder._rows) <= MAX_TRACES
    assert len(builder._rows["ab12"]) < 100


def test_trace_ids_keep_their_digits() -> None:
    assert trace_id("592aa30af5fffcfa") == 0x592AA30AF5FFFCFA
    assert 0 < trace_id("k-1") < 1 << 128
    assert trace_id("0") > 0


class Collector:
    """Receives OTLP over HTTP, and keeps the spans of all posts by name."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.came = threading.Condition()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.take(self.path, body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert path == "/v1/traces"
        with self.came:
            for resource_span in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(attributes(resource_span.resource))
                self.spans += [span for scope in resource_span.scope_spans for span in scope.spans]
            self.came.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(of: Any) -> dict[str, str]:
    return {attribute.key: attribute.value.string_value for attribute in of.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk.trace", reason="everstep[otel] is not installed")
    running = Collector()
    yield running
    running.close()


@pytest.mark.slow
def test_collector_receives_one_trace_for_a_recovery(tmp_path: Path, collector: Collector) -> None:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}", otlp_endpoint=collector.url)) as client:
        agents = running_job(client, "n1", "n2", "n3", spare="n4")
        agents[1].report(FindingRaised(finding=FELL_OFF))
        resume([agents[0], agents[3], agents[2]], 2)
        with collector.came:
            assert collector.came.wait_for(lambda: len(collector.spans) >= 7, 30)
    (whole,) = [span for span in collector.spans if not span.parent_span_id]
    assert whole.name == "recovery"
    assert {span.trace_id for span in collector.spans} == {trace_id(FELL_OFF.trace).to_bytes(16, "big")}
    parts = [span for span in collector.spans if span.parent_span_id == whole.span_id]
    assert {part.name for part in parts} == {"signal", "decision", "directives", "regroup", "restore", "first_step"}
    assert min(part.start_time_unix_nano for part in parts) == whole.start_time_unix_nano
    assert max(part.end_time_unix_nano for part in parts) == whole.end_time_unix_nano
    for span in collector.spans:
        found = attributes(span)
        assert (found["everstep.node"], found["everstep.rule"]) == ("n2", "xid-79")
        assert found["everstep.verdict"].startswith("n2-")
    assert collector.resources[0]["service.name"] == "everstep-controller"


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_controller_ends_without_its_collector(tmp_path: Path, collector: Collector) -> None:
    gone = "http://127.0.0.1:1/v1/traces"
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}", otlp_endpoint=gone)) as client:
        agents = running_job(client, "n1", "n2", "n3", spare="n4")
        agents[1].report(FindingRaised(finding=FELL_OFF))
        resume([agents[0], agents[3], agents[2]], 2)


def test_missing_packages_are_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_traces, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"everstep\[otel\]"):
        TraceExporter("http://collector:4318/v1/traces", "c1")
