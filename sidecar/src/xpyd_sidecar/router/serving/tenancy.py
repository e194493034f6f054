"""A request of a tenant: what its tenant may do, what the request takes of the tenant's tokens, and what it is charged.

    admission ──begin: something is left?──▶ parsed ──may_use──▶ take ──▶ queue, engines ──▶ end: settled by usage
                └ 429                          └ 403             └ headers x-ratelimit-*

A request is charged for what an engine did for a client that may have had something of it: nothing where no engine was
asked, or where the client heard an error.
"""

from __future__ import annotations

import math
from time import time

from xpyd_sidecar.contract.tenants import Tenant
from xpyd_sidecar.router.api.faults import HttpFault, too_many
from xpyd_sidecar.router.api.spending import ExpectedTokens
from xpyd_sidecar.router.balance.quotas import QuotaRefusal, Quotas, TenantAccount, TokenReservation
from xpyd_sidecar.router.observing.record import Record
from xpyd_sidecar.router.stream import answers

AGAIN_S = (1, 86_400)
"""Least and most that a client is told to wait."""
ERRORS = 400
_WORDS = {"minute": "tokens a minute", "day": "tokens a day", "in_flight": "requests in flight"}


class TenantRequest:
    """One request of one tenant."""

    __slots__ = ("_expected", "_prompt", "_quotas", "_taken", "account", "tenant")

    def __init__(self, tenant: Tenant, account: TenantAccount, quotas: Quotas) -> None:
        self.tenant = tenant
        self._quotas = quotas
        self.account = account
        self._expected = ExpectedTokens()
        self._taken: TokenReservation | None = None
        self._prompt = -1
        """Tokens of its prompt, as prefill says."""

    def begin(self, now: float, wanted: int) -> HttpFault | None:
        """429 where nothing is left; None: it may go on. ``wanted``: about how many tokens its body has."""
        refusal = self.account.refusal(now, time())
        if refusal is None:
            return None
        self._quotas.want(self.account, wanted)
        return spent_fault(self.tenant.name, refusal)

    def require_model(self, model: str | None) -> None:
        """Check the model that it asks for; None: it names none, and which one that is is not known. Raises HttpFault:
        403, its tenant may not use it.
        """
        tenant = self.tenant
        if not tenant.may_use(model):
            names = ", ".join(map(repr, tenant.models))
            asked = "name a model" if model is None else f"tenant {tenant.name!r} may not use model {model!r}"
            raise HttpFault(403, f"{asked}; it may use {names}", kind="permission_error", code="model_not_allowed",
                            param="model")

    def take(self, expected: ExpectedTokens, now: float) -> None:
        """Take what it is expected to take."""
        account = self.account
        self._expected = expected
        tokens = account.expected_tokens(expected.prompt, expected.answer)
        self._quotas.want(account, tokens)
        self._taken = account.take(tokens, now, time())

    def limits(self, now: float) -> bytes:
        """Headers that say what is left, as OpenAI names them; empty: no tokens are bounded."""
        left = self.account.standing(now, time())
        if left is None:
            return b""
        return (b"x-ratelimit-limit-tokens: %d\r\nx-ratelimit-remaining-tokens: %d\r\nx-ratelimit-reset-tokens: %.3fs\r\n"
                % (left.limit, left.remaining, left.reset_s))

    def note_prefill_usage(self, body: bytes) -> None:
        """Prefill has answered: how long the prompt is."""
        self._prompt = max(self._prompt, answers.lengths(body)[0])

    def end(self, now: float, record: Record | None = None) -> None:
        """It has ended; None: before it was served. What it is charged is in the record from then on."""
        taken, used, answer = self._taken, 0, -1
        if taken is None or not taken.open:
            return
        if record is not None:
            used, answer = self._charged(record, taken), record.tokens
            record.charged = used
        self.account.settle(taken, used, answer, now, time())

    def _charged(self, record: Record, taken: TokenReservation) -> int:
        if not record.legs or record.status >= ERRORS:
            return 0
        prompt = next((told for told in (record.prompt_tokens, self._prompt) if told >= 0), self._expected.prompt)
        cached = max(0, min(record.cached_tokens, prompt))
        if record.tokens >= 0:
            answer = record.tokens
        else:
            answer = max(0, taken.tokens - self._expected.prompt) if record.outcome == "ok" else 0
        return math.ceil(prompt - cached * (1 - self.tenant.cached_weight)) + answer


def spent_fault(name: str, refusal: QuotaRefusal) -> HttpFault:
    """429: nothing is left to a tenant."""
    least, most = AGAIN_S
    after_s = max(least, min(most, math.ceil(refusal.after_s)))
    return too_many(f"tenant {name!r} has its {refusal.limit} {_WORDS[refusal.bound]}", after_s)
