"""A collector of spans: takes OTLP over HTTP as real ones do, and remembers.

    with receiver() as r:
        ... r.endpoint ...
        r.wait(3)        spans by name, as the protobuf has them
"""

from __future__ import annotations

import contextlib
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span

HELD_S = 60.0


class Receiver:
    """Spans that came."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.status = 200
        self.answers = threading.Event()
        """It does; cleared: it takes nothing until this is set, for ``HELD_S`` at most."""
        self.answers.set()

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.paths.append(path)
        for group in request.resource_spans:
            self.resources.append({each.key: each.value.string_value for each in group.resource.attributes})
            for scope in group.scope_spans:
                self.spans.extend(scope.spans)

    def wait(self, count: int, timeout_s: float = 60.0) -> list[Span]:
        """Wait until so many spans are there. Blocks."""
        end = time.monotonic() + timeout_s
        while len(self.spans) < count:
            assert time.monotonic() < end, f"{len(self.spans)} of {count} spans came"
            time.sleep(0.02)
        return list(self.spans)


def attributes(span: Span) -> dict[str, Any]:
    """As Python values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


@contextlib.contextmanager
def receiver(certificate: tuple[str, str] | None = None) -> Iterator[Receiver]:
    """Listen on a free port of 127.0.0.1. ``certificate``: files of one for localhost and its key, for HTTPS."""
    made = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.answers.wait(HELD_S)
            if made.status == 200:
                assert self.headers["content-type"] == "application/x-protobuf"
                made.take(self.path, body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(made.status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    made.endpoint = f"{'https://localhost' if certificate else 'http://127.0.0.1'}:{server.server_address[1]}"
    try:
        yield made
    finally:
        made.answers.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
