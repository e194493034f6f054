"""What is said of a service: its status, the statuses of its pools, and Events for what is new."""

from __future__ import annotations

import msgspec

from xpyd_operator.api.status import Condition, ServiceStatus
from xpyd_operator.errors import XpydError
from xpyd_operator.kube.client.backoff import Holds
from xpyd_operator.kube.client.cache import Entry
from xpyd_operator.kube.client.events import now_text
from xpyd_operator.kube.keys.master import KeyTrouble
from xpyd_operator.kube.objects.blueprint import KubeBlueprint
from xpyd_operator.kube.objects.children import Children
from xpyd_operator.kube.reports.status import pool_status, service_status, unplanned_status
from xpyd_operator.kube.reports.status_writer import StatusWriter, read
from xpyd_operator.kube.service.shared import SharedParts
from xpyd_operator.plan.absent import Absence, Breakage, Waiting
from xpyd_operator.plan.conditions import shorten
from xpyd_operator.plan.news import news
from xpyd_operator.plan.round import Round
from xpyd_sidecar.contract.ids import Role


class ServiceReport:
    """Of one service. ``entry``, below: its document in the cache."""

    def __init__(self, shared: SharedParts, blueprint: KubeBlueprint, children: Children, holds: Holds) -> None:
        self._shared = shared
        self._blueprint = blueprint
        self._children = children
        self._holds = holds
        self._status = StatusWriter(shared.api, shared.cache)
        self._warned: tuple[tuple[str, str], ...] = ()
        self._rejected = ""
        """For what reason a gateway does not take the route, as it was told last; empty: it was not told so."""

    def write(
        self, entry: Entry, round_: Round, before: Round | None, sentence: str, *, gateway: Condition | None = None,
        prefetch: Condition | None = None,
    ) -> None:
        """Write statuses where they differ, and Events for what is new since ``before``. ``sentence``: the planner's;
        ``gateway``: what became of its route, ``prefetch``: of what is fetched ahead, where it has one.
        """
        service, blueprint, now = self._blueprint.service, self._blueprint, now_text()
        status = service_status(round_, service, self._shared.settings, valid=blueprint.valid, after=self._holds.waiting,
                                beside=[each for each in (gateway, prefetch) if each is not None])
        words = shorten("; ".join(part for part in (status.plan, sentence) if part)) or None
        status = msgspec.structs.replace(status, plan=words)
        self._status.put(entry, status, blueprint.generation, now)
        for role in Role:
            pool = self._children.pool(service, role)
            if pool is not None and role in blueprint.generations:
                self._status.put(pool, pool_status(round_, service, role), blueprint.generations[role], now)
        for each in news(before, round_):
            words = f"{each.instance}: {each.message}" if each.instance is not None else each.message
            self._shared.events.emit(entry, each.type, each.reason, words)
        self._warn(entry)
        self._tell(entry, gateway)

    def _tell(self, entry: Entry, gateway: Condition | None) -> None:
        """Of a gateway: when it does not take the route, again for another reason, and when it does at last."""
        if gateway is None:
            self._rejected = ""
        elif gateway.status == "False" and gateway.reason != self._rejected:
            self._rejected = gateway.reason
            self._shared.events.emit(entry, "Warning", "NotGatewayReady", f"{gateway.reason}: {gateway.message}")
        elif gateway.status == "True" and self._rejected:
            self._rejected = ""
            self._shared.events.emit(entry, "Normal", gateway.type, gateway.message)

    def _warn(self, entry: Entry) -> None:
        """Of a document: once, and again when the operator begins."""
        if self._warned != self._blueprint.warnings:
            for reason, words in self._blueprint.warnings:
                self._shared.events.emit(entry, "Warning", reason, words)
        self._warned = self._blueprint.warnings

    def write_refusal(self, entry: Entry, error: XpydError) -> None:
        """Write that the document cannot be followed, and none was ever accepted while this process lives."""
        valid = self._blueprint.valid
        before = read(entry.body, ServiceStatus)
        why: Absence = Breakage(valid.reason, valid.message)
        if valid.status != "False":  # it cannot be told at present, and will be
            if any(each.type == "Valid" for each in before.conditions):
                return
            why = Waiting("NotReached", str(error))
            valid = Condition(type="Valid", status="Unknown", reason=why.reason, message=why.message)
        status = unplanned_status(before, why, valid)
        self._status.put(entry, status, entry.body["metadata"].get("generation"), now_text())
        if valid.status == "False":
            self._shared.events.emit(entry, "Warning", valid.reason, valid.message)

    def write_key_problem(self, entry: Entry, error: KeyTrouble) -> None:
        """Write that the key of its pods cannot be told. It stays a status of the document that was acted on last."""
        before = read(entry.body, ServiceStatus)
        status = unplanned_status(before, Breakage(error.reason, str(error)))
        self._status.put(entry, status, before.observed_generation, now_text())
        self._shared.events.emit(entry, "Warning", error.reason, str(error))

    async def close(self) -> None:
        """Write what was said, as far as that goes in time."""
        await self._status.close()
