"""What instances tell of their caches of prefixes: taken in order, or not at all until all of it is told anew."""

from __future__ import annotations

from xpyd_sidecar.contract import held_prefixes
from xpyd_sidecar.contract.membership import PrefixChanges
from xpyd_sidecar.router.balance.candidates import PrefixCacheIndex
from xpyd_sidecar.router.fleet import heartbeat_validation
from xpyd_sidecar.router.fleet.member import BeatRefused
from xpyd_sidecar.router.fleet.roster import Roster


class ToldPrefixes:
    """Takes messages about caches for what a router believes that instances hold."""

    def __init__(self, roster: Roster, holdings: PrefixCacheIndex) -> None:
        self._roster, self._holdings = roster, holdings

    def take(self, changes: PrefixChanges) -> None:
        """Take one message. What comes after a gap, or of who does not speak for the instance, is left aside: the next
        acknowledgement says which one was taken last, and all is told anew.

        Raises:
            BeatRefused: another version or service, or keys that are none.
        """
        heartbeat_validation.refuse_foreign(self._roster.service, changes)
        member = self._roster.find(changes.instance, changes.incarnation)
        if member is None or member.agent != changes.agent:
            return
        if not changes.whole and changes.seq != member.prefixes_seq + 1:
            return
        try:
            added, removed = held_prefixes.unpack(changes.added), held_prefixes.unpack(changes.removed)
        except ValueError as error:
            raise BeatRefused(f"{error} - at `$.added` or `$.removed`") from None
        self._holdings.tell(member, added, removed, whole=changes.whole)
        member.prefixes_seq = changes.seq
