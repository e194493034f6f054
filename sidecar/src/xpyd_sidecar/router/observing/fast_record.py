"""What is known of a request that went its straight course: prefill and decode answered well at once, as nearly always."""

from __future__ import annotations

import msgspec

from xpyd_sidecar.contract.ids import InstanceName, Role, TransferId
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.observing.record import LegRecord, Record


class StraightRecord(msgspec.Struct, eq=False):
    """One request; times are those of ``Record``."""

    request_id: str
    transfer: TransferId
    api: Api
    prefill: InstanceName
    decode: InstanceName
    arrived: float
    arrived_unix: float
    opened: float
    """When both legs were sent."""
    prefilled: float
    begun: float
    ended: float
    """Decode's leg, and with it the request."""
    tokens: int
    prompt_tokens: int
    prompt_size: int
    sent: int
    """``Record.bytes``"""

    @property
    def ended_unix(self) -> float:
        """When it ended, on the clock of ``arrived_unix``."""
        return self.arrived_unix + self.ended - self.arrived

    def record(self) -> Record:
        """All of it, as of any request."""
        legs = [LegRecord(Role.PREFILL, self.prefill, 1, self.opened, self.prefilled, self.prefilled, "2xx"),
                LegRecord(Role.DECODE, self.decode, 1, self.opened, self.begun, self.ended, "2xx")]
        return Record(
            self.request_id, self.transfer, self.api, True, self.arrived, self.arrived_unix, "ok", 200, first_at=self.begun,
            last_at=self.ended, tokens=self.tokens, prompt_tokens=self.prompt_tokens, prompt_size=self.prompt_size,
            attempt=1, bytes=self.sent, legs=legs)
