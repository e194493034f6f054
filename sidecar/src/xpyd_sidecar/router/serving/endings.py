"""What the log and a request's record say of how its legs and it ended."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Final

from xpyd_sidecar.router.api.faults import FailureKind, FailureReason
from xpyd_sidecar.router.http.reply import Reply
from xpyd_sidecar.router.observing.record import REFUSED, Record
from xpyd_sidecar.router.serving.attempts import OpenAttempt
from xpyd_sidecar.router.serving.exchange import Exchange
from xpyd_sidecar.router.serving.instructions import RequestOver

logger = logging.getLogger(__name__)
SHOWN: Final = 500
"""Bytes of a refusal that the log and the record show."""


def warn_refused(record: Record, leg: OpenAttempt, status: int, body: bytes) -> None:
    """Log that a prefill instance answered with an error of HTTP, and how its ``body`` begins."""
    logger.warning("prefill instance answered %d", status, extra={
        "transfer": record.transfer, "peer": leg.send.target.instance, "detail": body[:SHOWN].decode("utf-8", "replace")})


def warn_failed(record: Record, leg: OpenAttempt, kind: FailureKind, reason: FailureReason) -> None:
    """Log that a leg ended without an answer."""
    logger.warning("%s leg failed: %s", leg.send.role, reason.full, extra={
        "transfer": record.transfer, "peer": leg.send.target.instance, "kind": kind.value, "address": leg.call.address})


def finish(record: Record, exchange: Exchange, over: RequestOver, lengths: tuple[int, int] | None, reply: Reply) -> None:
    """Write into the record how a request ended.

    Args:
        record: of the request.
        exchange: its machine, which has ended.
        over: how.
        lengths: tokens of the prompt and of the answer, where a stream was relayed that told them.
        reply: what the client got.
    """
    record.outcome, record.status = record.outcome or over.outcome, reply.status
    record.attempt = exchange.attempt
    if over.detail:
        record.detail = over.detail[:SHOWN]
    if retries := exchange.retries:
        record.retries, record.continued = retries, exchange.continued
    if exchange.refused and not record.skips:
        record.skips = REFUSED
    if lengths is not None:
        record.prompt_tokens, record.tokens = lengths
    record.last_at, record.bytes = perf_counter(), reply.sent_bytes
