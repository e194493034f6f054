"""Prefill and decode of one fingerprint, while two fingerprints run side by side.

A request never crosses fingerprints, so the instances that serve fall into groups of one fingerprint each, and a group is
worth something only while it has both roles:

    before            after a step                    allowed
    2P 3D of f        1P 2D of f                      yes
    1P 3D of f        0P 2D of f                      no: its decode would be left without prefill
    1P 1D of f        0P 0D of f                      yes: the group goes as a whole
    0P 2D of f        0P 1D of f                      yes: it paired with nobody before

So that a group can go as a whole at all, both roles give up the same group first (``rank``), and neither runs ahead of the
other by more than an instance (``lead``); where both are due, both go in one step.

Where no instance may be added (surge 0), a role's only instance must go before a new one can come, and its group stops
pairing. ``may_go_blank`` says in which order: first a role that has several, so that a broken revision shows where it costs
least; of two roles with one each prefill, since decode can do the prefill itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from xpyd_operator.plan.canary import RoleView, prints
from xpyd_operator.plan.observed import Instance
from xpyd_sidecar.contract.ids import Fingerprint, Role


def group(instances: Iterable[Instance]) -> Counter[Fingerprint]:
    """How many serve of each known fingerprint."""
    return Counter(instance.fingerprint for instance in instances if instance.ready and instance.fingerprint)


def rank(mine: RoleView, other: RoleView) -> dict[Fingerprint, tuple[bool, int, str]]:
    """Which group goes first: one that cannot pair, then the smallest. The same for both roles."""
    ours, theirs = group(mine.serving), group(other.serving)
    return {
        found: (ours[found] > 0 and theirs[found] > 0, ours[found] + theirs[found], found) for found in ours.keys() | theirs
    }


def lead(mine: RoleView, other: RoleView, follow: int) -> int:
    """How many old ones that serve may go, so that the share that is still old stays within an instance of the other's.

    With w wanted and o old ones of this role, W and O of the other, of which F are due in the same step (``follow``): the
    largest n for which (o - n) / w >= (O - F) / W - max(1 / w, 1 / W). The other role is bounded in the same way, so that
    each goes as far as the slower one goes.
    No bound where several fingerprints are old: then a group of few must be able to go first.
    """
    old, theirs = group(mine.stale), group(other.stale)
    count = old.total()
    if not mine.wanted_count or not other.wanted_count or len(old.keys() | theirs.keys()) > 1:
        return count
    slack = max(mine.wanted_count, other.wanted_count)
    behind = max(0, min(other.wanted_count, theirs.total()) - follow)
    return max(0, (count * other.wanted_count - behind * mine.wanted_count + slack) // other.wanted_count)


def reasons_to_keep(prefill: RoleView, decode: RoleView, going: tuple[list[Instance], list[Instance]]) -> dict[str, str]:
    """Why some of those that would be drained (prefill, decode; the first to go first) must stay for now: name → why."""
    if not prefill.wanted_count or not decode.wanted_count:
        return {}
    views = (prefill, decode)
    before = (group(prefill.serving), group(decode.serving))
    after = tuple(have - group(leaving) for have, leaving in zip(before, going, strict=True))
    stay: dict[str, str] = {}
    for found in sorted(before[0].keys() & before[1].keys()):
        left = (after[0][found], after[1][found])
        if all(left) or not any(left):
            continue
        side = 0 if not left[0] else 1
        last = [instance for instance in going[side] if instance.fingerprint == found][-1]
        if views[side].target.max_surge > 0 or views[side].fresh:
            role, other = views[side].role, views[1 - side].role
            stay[last.name] = f"it is the last {role} of {found[:8]}, of which {left[1 - side]} {other} serve"
    return stay


def can_pair(mine: RoleView, other: RoleView) -> bool:
    """Whether new instances of a role have somebody of the other role to exchange KV with."""
    return not other.wanted_count or bool(prints(mine.fresh) & prints(other.serving))


def may_go_blank(mine: RoleView, other: RoleView) -> bool:
    """Surge 0: whether the only instance that serves in a role may go for the first of a new revision."""
    if not other.wanted_count or other.fresh_ready:
        return True
    return mine.role is Role.PREFILL and other.ready <= 1
