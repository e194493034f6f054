"""Refusals that are no errors: a namespace that ends, a quota that is used up. Trying again at once changes nothing."""

from __future__ import annotations

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.plan.absent import PUT_OFF, Waiting

FIRST_S = 5.0
LONGEST_S = 60.0
LATELY_S = 900.0
"""A refusal so long ago says nothing of what is refused now."""


class Holds:
    """What holds the making of objects up, and until when; each time in a row for longer."""

    def __init__(self) -> None:
        self._words = ""
        self._until = 0.0
        self._wait_s = FIRST_S

    def excuses(self, error: ApiError, what: str, now: float) -> bool:
        """Whether this refusal only means to wait; then nothing is made for a while."""
        if error.reason == "NamespaceTerminating":
            why = "the namespace is being deleted"
        elif error.status == 403 and "exceeded quota" in error.message:
            why = error.message
        else:
            return False
        if not self.is_holding(now):
            self._wait_s = min(LONGEST_S, self._wait_s * 2.0) if now - self._until < LONGEST_S else FIRST_S
            self._until = now + self._wait_s
        self._words = f"{what} waits: {why}"
        return True

    def is_holding(self, now: float) -> bool:
        """Whether it is too early to try again."""
        return now < self._until

    def refused_lately(self, now: float) -> bool:
        """Whether something was refused so lately that the next may be: what is of use as a whole is made one by one."""
        return self._until > 0 and now - self._until < LATELY_S

    def clear(self, now: float) -> None:
        """Forget what was refused, as something was made or nothing is to be made any more; nothing while that holds."""
        if not self.is_holding(now):
            self._words, self._wait_s = "", FIRST_S

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        """What waits and why; empty where nothing does."""
        return (Waiting(PUT_OFF, self._words, until=self._until, place=True),) if self._words else ()
