"""Spans of requests and legs, for OpenTelemetry. Imported only where ``otlp_endpoint`` is set.

    client's span (traceparent) ── server span "chat" ─┬─ client span "prefill"    one per leg: attempt, instance, result
                                                       └─ client span "decode"     its context goes to the engine

The W3C trace context of the client is continued, its sampling decision included; without one a trace begins here, and is
sampled. Spans are sent in batches by a thread of their own; what does not fit into its queue is dropped, and the log says
so. Certificates and headers for the collector are taken from the variables ``OTEL_EXPORTER_OTLP_*``.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from xpyd_sidecar import __version__
from xpyd_sidecar.contract.ids import InstanceName, Role, ServiceName
from xpyd_sidecar.router.observing.record import FAILED, LegRecord, Record

QUEUE = 4096
"""Spans that wait to be sent."""
BATCH = 512
DELAY_MS = 2000
TIMEOUT_S = 5
"""For one batch, retries included; what was not taken by then is dropped."""
CLOSE_S = 3
"""How long the end of a router may wait for the last batch."""
OPERATIONS = {"completions": "text_completion"}
"""What OpenTelemetry's conventions for generative AI call an API; all others are chats."""
PROVIDER = "vllm"
_CONTEXT = ("traceparent", "tracestate")
Headers = list[tuple[bytes, bytes]]


def url_of(endpoint: str) -> str:
    """Where spans go: ``http://host:4318`` stands for ``http://host:4318/v1/traces``, a longer path for itself."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


class SpanTracing:
    """Makes the spans of one router and sends them."""

    def __init__(self, endpoint: str, service: ServiceName, router: InstanceName) -> None:
        """Start the thread that sends."""
        exporter = OTLPSpanExporter(url_of(endpoint), timeout=TIMEOUT_S)
        processor = BatchSpanProcessor(exporter, max_queue_size=QUEUE, schedule_delay_millis=DELAY_MS,
                                       max_export_batch_size=BATCH)
        resource = Resource.create({"service.name": "xpyd-router", "service.namespace": service,
                                    "service.instance.id": router, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self.tracer = self._provider.get_tracer("xpyd_sidecar", __version__)
        self.propagator = TraceContextTextMapPropagator()

    def begin(self, headers: Mapping[bytes, bytes], record: Record, model: str = "") -> Trace:
        """The trace of a request that has come; ``headers`` are its client's. ``model``: which it asks for."""
        carrier = {name: headers[name.encode()].decode("latin-1") for name in _CONTEXT if name.encode() in headers}
        operation = OPERATIONS.get(record.api, "chat")
        span = self.tracer.start_span(f"{operation} {model}".rstrip(), context=self.propagator.extract(carrier),
                                      kind=SpanKind.SERVER, start_time=_nanoseconds(record.arrived_unix), attributes={
            "gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER,
            **({"gen_ai.request.model": model} if model else {})})
        return Trace(self, span, record)

    async def close(self) -> None:
        """Send what waits, for at most ``CLOSE_S``; the thread that is still sending then ends with the process."""
        last = threading.Thread(target=self._provider.shutdown, name="spans-close", daemon=True)
        last.start()
        await asyncio.to_thread(last.join, CLOSE_S)


class Trace:
    """The spans of one request."""

    def __init__(self, tracing: SpanTracing, span: Span, record: Record) -> None:
        self._tracing, self._span, self._record = tracing, span, record
        self._legs: list[Span] = []

    def leg(self, leg: LegRecord) -> Headers:
        """A leg is sent, the next one of the record: the headers that go with it."""
        tracing, carrier = self._tracing, dict[str, str]()
        child = tracing.tracer.start_span(leg.role.value, context=set_span_in_context(self._span), kind=SpanKind.CLIENT,
                                          start_time=_nanoseconds(self._unix(leg.opened)))
        self._legs.append(child)
        tracing.propagator.inject(carrier, set_span_in_context(child))
        return [(name.encode(), value.encode()) for name, value in carrier.items()]

    def end(self) -> None:
        """The record is complete."""
        if not self._span.is_recording():
            return
        record = self._record
        for leg, span in zip(record.legs, self._legs, strict=False):
            _set(span, {"xpyd.role": leg.role.value, "xpyd.instance": leg.instance, "xpyd.attempt": leg.attempt,
                        "xpyd.result": leg.result, "xpyd.first_event_s": leg.first_at - leg.opened})
            self._finish(span, leg.ended, "" if leg.result in {"2xx", "4xx", "cancelled"} else leg.result)
        handovers, (seconds, ttft, tpot) = record.handovers(), record.measures()
        _set(self._span, {
            "http.request.method": "POST", "http.response.status_code": record.status or None,
            "xpyd.request_id": record.request_id, "xpyd.transfer": record.transfer, "xpyd.outcome": record.outcome,
            "xpyd.stream": record.stream, "xpyd.attempt": record.attempt, "xpyd.retries": record.retries,
            "xpyd.continued": record.continued, "xpyd.skips": record.skips or None,
            "xpyd.prefill": record.last_instance(Role.PREFILL) or None,
            "xpyd.decode": record.last_instance(Role.DECODE) or None,
            "xpyd.queue_s": record.queued_s, "xpyd.ttft_s": ttft, "xpyd.tpot_s": tpot,
            "xpyd.handover_s": handovers[-1][2] if handovers else None,
            "xpyd.api": record.api, "gen_ai.request.stream": record.stream,
            "gen_ai.response.time_to_first_chunk": ttft,
            "error.type": record.outcome if record.outcome in FAILED else None,
            "gen_ai.usage.input_tokens": record.prompt_tokens if record.prompt_tokens >= 0 else None,
            "gen_ai.usage.output_tokens": record.tokens if record.tokens >= 0 else None})
        words = record.detail or record.outcome
        self._finish(self._span, record.arrived + seconds, words if record.outcome in FAILED else "")

    def _finish(self, span: Span, at: float, error: str) -> None:
        if error:
            span.set_status(Status(StatusCode.ERROR, error[:500]))
        span.end(_nanoseconds(self._unix(at)))

    def _unix(self, at: float) -> float:
        return self._record.arrived_unix + at - self._record.arrived


def _set(span: Span, attributes: dict[str, Any]) -> None:
    span.set_attributes({name: value for name, value in attributes.items()
                         if value is not None and not (isinstance(value, float) and math.isnan(value))})


def _nanoseconds(at_unix: float) -> int:
    return int(at_unix * 1e9)
