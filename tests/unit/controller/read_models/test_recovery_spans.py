"""Recoveries as spans: out of audit rows alone, and as a collector receives them."""

from __future__ import annotations

import gzip
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from everstep_controller.read_models import otlp_traces
from everstep_controller.read_models.otlp_traces import TraceExporter, trace_id
from everstep_controller.read_models.recovery_spans import MAX_TRACES, RecoverySpanBuilder, RecoverySpans
from everstep_controller.store.rows import AuditRow
from starlette.testclient import TestClient

from everstep.errors import ConfigurationError
from everstep.wire.v1.training import FindingRaised
from tests.support.controllers import InProcess
from tests.support.spoken import FELL_OFF, resume, running_job

PHASES = {"abort_s": "0.1", "rendezvous_s": "0.2", "restore_s": "0.4", "first_step_s": "0.1"}


def row(kind: str, at: float, *, trace: str = "ab12", node: str = "", **detail: str) -> AuditRow:
    of_job = {"job": "llama", "generation": 2} if kind in ("generation", "resumed") else {}
    return AuditRow(id=1, at=at, kind=kind, sentence=kind, node=node, trace=trace, detail=json.dumps(detail), **of_job)


def eviction() -> list[AuditRow]:
    return [
        row("finding", 100.2, node="n3", rule="gpu.xid.79", seen_at="100.0"),
        row("verdict.evict", 100.3, node="n3", verdict="n3-1"),
        row("generation", 100.3, reason="node_evicted"),
        row("resumed", 101.3, took_s="1.0", restored="1/40", slowest_rank="5", **PHASES),
    ]


def spans_of(rows: list[AuditRow]) -> list[RecoverySpans]:
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


def test_recovery_of_an_earlier_leader_starts_with_the_decision() -> None:
    (recovery,) = spans_of(eviction()[-1:])
    assert (recovery.whole.start, recovery.whole.end) == (100.3, 101.3)
    assert [part.end - part.start for part in recovery.parts[:2]] == [0.0, 0.0]


def test_phases_longer_than_the_recovery_are_shortened() -> None:
    (recovery,) = spans_of([*eviction()[:-1], row("resumed", 100.7, took_s="0.4", **PHASES)])
    assert recovery.parts[2].end == pytest.approx(100.3)
    assert sum(part.end - part.start for part in recovery.parts) == pytest.approx(0.7)


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
            for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                self.resources.append(attributes(one.resource))
                self.spans += [span for scope in one.scope_spans for span in scope.spans]
            self.came.notify_all()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(of: Any) -> dict[str, str]:
    return {one.key: one.value.string_value for one in of.attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk.trace", reason="everstep[otel] is not installed")
    one = Collector()
    yield one
    one.close()


@pytest.mark.slow
def test_collector_receives_one_trace_for_a_recovery(tmp_path: Path, collector: Collector) -> None:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}", otlp_endpoint=collector.url)) as client:
        speakers = running_job(client, "n1", "n2", "n3", spare="n4")
        speakers[1].report(FindingRaised(finding=FELL_OFF))
        resume([speakers[0], speakers[3], speakers[2]], 2)
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
        speakers = running_job(client, "n1", "n2", "n3", spare="n4")
        speakers[1].report(FindingRaised(finding=FELL_OFF))
        resume([speakers[0], speakers[3], speakers[2]], 2)


def test_missing_packages_are_named_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_traces, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"everstep\[otel\]"):
        TraceExporter("http://collector:4318/v1/traces", "c1")
