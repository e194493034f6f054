"""What is known of one request when it is over, from which log, metrics and spans are made; and its measures.

    arrived ─── queued_s ───┬─ prefill leg ──▶ 2xx ┐
                            │                      ├─ handover ─▶ decode's first event ── tokens ──▶ end
                            └─ decode leg ─ waits ─┘
    ├──────────────────────── TTFT ──────────────────────────────┤├── TPOT * (tokens - 1) ─────────┤

Times are seconds of ``time.perf_counter``; NaN where a thing never happened. ``arrived_unix`` ties them to a wall clock.
"""

from __future__ import annotations

import math

import msgspec

from xpyd_sidecar.contract.ids import InstanceName, Role, TransferId

REFUSED = "refused"
"""Why a request went without prefill, where prefill said that it is wrong (``Record.skips``)."""
HELD = "held"
"""Outcome of a request that no engine was there for: it waits for one, and is served then as another one."""
SILENT = "silent"
"""Result of a leg that was left for another one, since it gave nothing for too long."""
FAILED = frozenset({"failed", "broken", "timeout", "unavailable", "poison"})
"""Outcomes that the router or its engines are to blame for: neither served nor the client's own doing."""
_DONE = "2xx"


class LegRecord(msgspec.Struct):
    """One leg, from its request to its end."""

    role: Role
    instance: InstanceName
    attempt: int
    """Of the transfer; 0 where decode serves without prefill."""
    opened: float
    first_at: float = math.nan
    """First event of a stream, or the whole answer."""
    ended: float = math.nan
    result: str = ""
    """``2xx``, ``4xx``, ``5xx``, ``cancelled``, ``aborted``, ``refused``, ``lost``, ``broken``, ``differs``, ``silent``;
    empty while it is open."""


class Record(msgspec.Struct):
    """One request that engines answered."""

    request_id: str
    transfer: TransferId
    api: str
    """``completions``, ``chat``, or a dialect's name; empty where nothing is generated."""
    stream: bool
    arrived: float
    arrived_unix: float
    """Seconds since 1970."""
    outcome: str = ""
    status: int = 0
    """HTTP status that the client got; 0 where it got none."""
    detail: str = ""
    """What went wrong, in words; empty where nothing did."""
    queued_s: float = 0.0
    """How long it waited for a place."""
    first_at: float = math.nan
    """First byte of the answer's body on its way to the client."""
    last_at: float = math.nan
    """The end of the request."""
    tokens: int = -1
    """Generated tokens that were relayed, counted by their ids; -1: not known."""
    prompt_tokens: int = -1
    """-1: not known."""
    path: str = ""
    """Of the router's table, where its answer passed through; empty for completions and chats."""
    prompt_size: int = 0
    """About how many tokens the prompt has, by its bytes."""
    skips: str = ""
    """The field, or the rule, that made it skip prefill, or ``REFUSED``; empty where it did not."""
    attempt: int = 0
    """The last one of its transfer."""
    retries: int = 0
    """Legs sent beyond the first pair."""
    bytes: int = 0
    """Of the answer's body, on their way to the client, framing included."""
    continued: int = 0
    """How often its stream went on elsewhere."""
    legs: list[LegRecord] = []
    tenant: str = ""
    """Whose it is; empty where there are no tenants. What follows is known of tenants' requests alone."""
    model: str = ""
    cached_tokens: int = -1
    """Of its prompt, that prefill had, or decode where that served alone; -1: not known."""
    charged: int = 0
    """Tokens that its tenant has paid for it."""

    @property
    def ended_as(self) -> str:
        """The result of its last decode leg; empty where none was sent."""
        return next((leg.result for leg in reversed(self.legs) if leg.role is Role.DECODE), "")

    @property
    def is_complete(self) -> bool:
        """Whether an engine answered it to its end."""
        ends = [leg.result for leg in self.legs if leg.role is Role.DECODE or self.outcome == "client_error"]
        return self.outcome in {"ok", "client_error"} and bool(ends) and ends[-1] in {"2xx", "4xx"}

    def last_instance(self, role: Role) -> str:
        """The instance that the last leg of a role went to; empty where none did."""
        for leg in reversed(self.legs):
            if leg.role is role:
                return leg.instance
        return ""

    # ---- measures

    def measures(self) -> tuple[float, float | None, float | None]:
        """Seconds of the whole request, its TTFT and its TPOT.

        A served request ends with the decode leg; ``last_at`` may be later, when a prefill leg took longer to end. TTFT is
        from arrival to the first event of the stream. None: no stream began; answers that come whole have no first token
        that a client could see. TPOT is (end - first token) / (tokens - 1). None: no whole stream of two tokens or more.
        ``tokens`` counts ids, not chunks: a chunk may carry several.
        """
        ended, first, served = self.last_at, self.first_at, self.outcome == "ok"
        for leg in reversed(self.legs) if served else ():
            if leg.role is Role.DECODE and leg.result == _DONE and leg.ended <= ended:
                ended = leg.ended
                break
        if not self.stream or math.isnan(first) or self.status >= 400:
            return ended - self.arrived, None, None
        each = max(0.0, ended - first) / (self.tokens - 1) if served and self.tokens >= 2 else None
        return ended - self.arrived, first - self.arrived, each

    def handovers(self) -> list[tuple[InstanceName, InstanceName, float]]:
        """The pairs that worked: for each decode leg that answered, the prefill leg whose KV it had. Prefill, decode, and
        the seconds from the end of the one to the other's first event, at least 0: what the way of the KV adds to TTFT.

        A decode leg of attempt a waits while prefill legs a, a + 1 … are tried; the next decode leg starts a later attempt,
        and the KV of the former went elsewhere. Attempt 0 is decode alone.
        """
        out: list[tuple[InstanceName, InstanceName, float]] = []
        if len(self.legs) < 2:
            return out
        below = math.inf
        for decode in reversed(self.legs):
            if decode.role is not Role.DECODE or not decode.attempt:
                continue
            for leg in reversed(self.legs):
                if leg.role is Role.PREFILL and leg.result == _DONE and decode.attempt <= leg.attempt < below:
                    if not math.isnan(decode.first_at):
                        out.append((leg.instance, decode.instance, max(0.0, decode.first_at - leg.ended)))
                    break
            below = decode.attempt
        return out[::-1]
