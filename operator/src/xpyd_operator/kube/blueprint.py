"""What one DisaggService asks for: decoded, checked, tried, and in force as long as nothing better is.

    watched body ─▶ decode ─▶ what this backend can do ─▶ dry run of a pod ─▶ in force
                      │ Invalid      │ Unsupported            │ TemplateRejected
                      └──────────────┴── Valid=False, and the last good document goes on ┘

Unknown fields (a newer CRD's) are dropped with a warning in the condition. Counts come from the pools.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from xpyd_operator.api import devices
from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.durations import seconds
from xpyd_operator.api.roles import GPU
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.status import Condition
from xpyd_operator.errors import SpecError, Unsupported, XpydError
from xpyd_operator.kube.cache import Cache, Entry
from xpyd_operator.kube.children import Children
from xpyd_operator.kube.dryrun import DryRun
from xpyd_operator.kube.key import KeySecret, NameTaken
from xpyd_operator.kube.observe import facts
from xpyd_operator.plan.counts import Counts, counts
from xpyd_operator.plan.desired import Desired, Revision, RoleTarget
from xpyd_operator.render.compare import differs
from xpyd_operator.render.labels import router_name
from xpyd_operator.render.objects import router_deployment
from xpyd_operator.render.pod import pod_revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.switch import NEVER, pods_difference
from xpyd_operator.render.unsupported import kube_refusals
from xpyd_sidecar.contract.ids import Role, ServiceName

logger = logging.getLogger(__name__)
Body = dict[str, Any]
FAULTS_MAX = 20


class Refused(XpydError):
    """The document cannot be followed, and there is none before it that could be."""


class Gone(XpydError):
    """The service does not exist any more, or is being deleted: nothing may be written for it."""


class Judged(msgspec.Struct, frozen=True):
    """A document, and what is against it (``reason`` empty: nothing)."""

    service: DisaggService | None
    reason: str = ""
    message: str = ""
    warnings: str = ""


def judge(body: Body) -> Judged:
    """Decode a watched document, and see whether this backend can do what it asks for."""
    try:
        document = {key: part for key, part in body.items() if key != "status"}
        decoded = decode_service(document, strict=False, target=Target.KUBERNETES)
    except SpecError as error:
        return Judged(None, "Invalid", _listed([str(fault) for fault in error.faults]))
    refused = [f"{path}: {reason}" for path, reason in kube_refusals(decoded.service)]
    if refused:
        return Judged(None, "Unsupported", _listed(refused))
    return Judged(decoded.service, warnings=_listed([str(fault) for fault in decoded.warnings]))


class Blueprint:
    """Of one service. ``service`` is the document in force, ``valid`` what is said of the newest one."""

    def __init__(
        self, cache: Cache, children: Children, secret: KeySecret, dry_run: DryRun, settings: KubeSettings
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._no_switch = ""
        self._counts_since = 0.0
        """Since when the counts are what they are. After a start of the operator a surplus waits once more."""
        self._children = children
        self._secret = secret
        self._dry_run = dry_run
        self._judged: tuple[tuple[str, object], Judged] | None = None
        self._service: DisaggService | None = None
        self._rewritten: DisaggService | None = None
        """The document as it is followed; the same object while nothing changes."""
        self._without_devices: dict[Role, Revision] = {}
        """Revisions of roles that were seen with pods without devices, where the document does not say so."""
        self.valid = Condition(type="Valid", status="Unknown", reason="NotSeen")
        self.revisions: dict[Role, Revision] = {}
        """Of the document in force."""
        self.counts: Counts | None = None
        self.generation: int | None = None
        """Of the document that was considered last, in force or refused."""
        self.generations: dict[Role, int] = {}
        """Of the pools as they were counted."""

    @property
    def service(self) -> DisaggService:
        """The document in force. Raises Refused without one."""
        if self._service is None:
            raise Refused(self.valid.message or "no document was accepted yet")
        return self._service

    async def desired(self, entry: Entry, now: float) -> Desired:
        """For the planner.

        Raises:
            Refused: neither this document nor one before it can be followed.
            XpydError: it cannot be told at present.
        """
        await self._consider(entry, now)
        self.generation = entry.body["metadata"].get("generation")
        service = self.service
        spec = service.spec
        found = counts(service, self._pools(service))
        if self.counts is None or (self.counts.prefill, self.counts.decode) != (found.prefill, found.decode):
            self._counts_since = now
        self.counts = found
        one_by_one = spec.prefill.scaling is not None and spec.decode.scaling is not None
        targets = {role: RoleTarget(found.of(role), self.revisions[role]) for role in Role}
        return Desired(
            service=ServiceName(service.name),
            prefill=targets[Role.PREFILL],
            decode=targets[Role.DECODE],
            router=None,
            max_surge=spec.rollout.max_surge,
            max_unavailable=spec.rollout.max_unavailable,
            drain_timeout_s=spec.drain.timeout_s,
            startup_timeout_s=seconds(spec.engine.startup_timeout),
            max_sidecars=spec.router.max_sidecars if spec.router.placement == "Sidecar" else 0,
            keep_terminating=False,
            switches=not self._no_switch,
            no_switch="" if self._no_switch == NEVER else self._no_switch,
            switch_window_s=spec.rollout.switch_window_s,
            counts_since=self._counts_since if one_by_one else 0.0,
            held=found.held,
            limited=found.limited,
        )

    async def _consider(self, entry: Entry, now: float) -> None:
        judged = self._judge(entry)
        if judged.service is None:
            self._refuse(judged.reason, judged.message)
            return
        try:
            await self._secret.ensure(judged.service, now)
        except NameTaken as error:
            self._refuse("NameTaken", str(error))
            return
        service, kept = self._kept(judged.service)
        revisions = {role: pod_revision(service, role, self._secret.identity) for role in Role}
        for role in Role:
            if service is self._service and self.revisions == revisions:
                break
            if words := await self._tried(service, role, revisions[role], now):
                self._refuse("TemplateRejected", f"the API server refuses a pod of {role}: {words}")
                return
        if service is not self._service and (words := await self._tried_router(service, now)):
            self._refuse("TemplateRejected", f"the API server refuses a pod of a router: {words}")
            return
        if service is not self._service:
            self._no_switch = pods_difference(service, self._settings)
        self._service, self.revisions = service, revisions
        reason = "UnknownFields" if judged.warnings else "DeviceNotStated" if kept else "Valid"
        message = _listed([*([judged.warnings] if judged.warnings else []), *kept]) or "the document is followed"
        self.valid = Condition(type="Valid", status="True", reason=reason, message=message)

    def _kept(self, service: DisaggService) -> tuple[DisaggService, list[str]]:
        """The document with roles kept without devices that were made so, and what is to be said of them.

        Resources that name no device once meant that there is none. Pods that were made then have the revision of such a
        role, and while there are some, or were since this operator began, the document means what it meant.
        """
        words = []
        for role in Role:
            if not devices.unstated(service.spec.role(role)):
                continue
            before = devices.without(service, role)
            revision = pod_revision(before, role, self._secret.identity)
            if self._without_devices.get(role) == revision or self._has_pods(service, revision):
                self._without_devices[role] = revision
                service = before
                words.append(
                    f"spec.{role}.resources: names no device, which meant none when this service was made, and its pods "
                    f"stay without one; write spec.{role}.parallelism.device: none to keep that, or {GPU}"
                )
        if not words:
            return service, words
        if self._rewritten is None or self._rewritten != service:
            self._rewritten = service
        return self._rewritten, words

    def _has_pods(self, service: DisaggService, revision: Revision) -> bool:
        pods = self._cache.of_service("Pod", service.metadata.namespace or "", service.name)
        found = (pod.derived(facts) for pod in pods)
        return any(fact.owner == service.metadata.uid and fact.revision == revision for fact in found)

    def _judge(self, entry: Entry) -> Judged:
        at = (entry.uid, entry.body["metadata"].get("generation"))
        if self._judged is None or self._judged[0] != at:
            started = time.perf_counter()
            self._judged = (at, judge(entry.body))
            logger.debug("judged %s/%s in %.4f s", entry.namespace, entry.name, time.perf_counter() - started)
        return self._judged[1]

    def _refuse(self, reason: str, message: str) -> None:
        condition = Condition(type="Valid", status="False", reason=reason, message=message)
        if condition != self.valid:
            logger.warning("document refused (%s): %s", reason, message)
        self.valid = condition

    async def _tried(self, service: DisaggService, role: Role, revision: Revision, now: float) -> str:
        """What the API server has against pods of this revision, where some are wanted and none exists."""
        if service.spec.role(role).most == 0:
            return ""
        for pod in self._cache.of_service("Pod", service.metadata.namespace or "", service.name):
            fact = pod.derived(facts)
            if fact.owner == service.metadata.uid and fact.revision == revision and fact.role is role:
                self._dry_run.accept(role, revision)
                return ""
        try:
            return await self._dry_run.ask(service, role, revision, now)
        except Unsupported as error:
            return str(error)

    async def _tried_router(self, service: DisaggService, now: float) -> str:
        """The same of a router's pod, where the document says what it is like, and none like it exists."""
        router = service.spec.router
        if router.placement != "Deployment" or (router.template is None and router.resources is None):
            return ""
        there = self._cache.get("Deployment", service.metadata.namespace or "", router_name(service.name))
        try:
            if there is not None and not differs(router_deployment(service, self._settings)["spec"], there.body["spec"]):
                return ""
            return await self._dry_run.ask_router(service, now)
        except Unsupported as error:
            return str(error)

    def _pools(self, service: DisaggService) -> dict[Role, int | None]:
        """The counts that stand in the pools that are there."""
        found: dict[Role, int | None] = {}
        self.generations = {}
        for role in Role:
            entry = self._children.pool(service, role)
            if entry is not None:
                found[role] = (entry.body.get("spec") or {}).get("replicas")
                self.generations[role] = entry.body["metadata"].get("generation", 0)
        return found


def _listed(words: list[str]) -> str:
    more = len(words) - FAULTS_MAX
    return "; ".join([*words[:FAULTS_MAX], *([f"and {more} more"] if more > 0 else [])])
