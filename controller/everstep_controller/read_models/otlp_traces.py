"""Export recoveries by OTLP over HTTP. It needs the packages of ``everstep[otel]``."""

from __future__ import annotations

import re
from importlib.util import find_spec

import xxhash

from everstep import __version__
from everstep.errors import ConfigurationError
from everstep_controller.read_models.recovery_spans import RecoverySpans

EXPORT_TIMEOUT_S = 3.0
"""Seconds for one post; the end of a controller waits no longer for a collector that does not answer."""
EXPORT_DELAY_S = 1.0
"""Seconds for which spans wait for others."""


def check_installed() -> None:
    """Raise ConfigurationError if OpenTelemetry's packages are missing."""
    names = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")
    try:
        missing = any(find_spec(name) is None for name in names)
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ConfigurationError("otlp_endpoint needs OpenTelemetry's packages: pip install 'everstep[otel]'")


class TraceExporter:
    """Posts recoveries from a thread of its own. Failed posts are logged and dropped, because no decision needs them.

    Args:
        endpoint: URL of the collector's traces, such as ``http://collector:4318/v1/traces``.
        instance: name of this controller.
    """

    def __init__(self, endpoint: str, instance: str) -> None:
        check_installed()
        # Imported late: an extra, which costs 20 MiB.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        class TraceIds(RandomIdGenerator):
            """Gives a trace the id that is set before."""

            next_id = 0

            def generate_trace_id(self) -> int:
                return self.next_id

        self._ids = TraceIds()
        named = {"service.name": "everstep-controller", "service.version": __version__, "service.instance.id": instance}
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=Resource(named), id_generator=self._ids, shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=EXPORT_DELAY_S * 1e3))
        self._tracer = self._provider.get_tracer("everstep.recovery", __version__)

    def export(self, recovery: RecoverySpans) -> None:
        """Queue a recovery; returns at once."""
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        self._ids.next_id = trace_id(recovery.trace)
        whole, start = recovery.whole, _nanoseconds(recovery.whole.start)
        span = self._tracer.start_span(whole.name, Context(), attributes=whole.attributes, start_time=start)
        context = set_span_in_context(span, Context())
        for part in recovery.parts:
            start, end = _nanoseconds(part.start), _nanoseconds(part.end)
            self._tracer.start_span(part.name, context, attributes=part.attributes, start_time=start).end(end)
        span.end(_nanoseconds(whole.end))

    def close(self) -> None:
        """Post what is queued, and end the thread."""
        self._provider.shutdown()


def trace_id(trace: str) -> int:
    """Return the id of a trace in OpenTelemetry: the same digits if they are hexadecimal, and else their hash."""
    number = int(trace, 16) if re.fullmatch("[0-9a-f]{1,32}", trace) else 0
    return number or xxhash.xxh3_128_intdigest(trace.encode())


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
