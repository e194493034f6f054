"""What one DisaggService asks for: decoded, checked, tried, and in force as long as nothing better is.

    watched body ─▶ judge (``render.judge``) ─▶ dry run of a pod and of the policies ─▶ in force
                      │ Invalid, Unsupported   │ TemplateRejected
                      └────────────────────────┴── Valid=False, and the last good document goes on

A document that was accepted once is followed until it changes, whatever a newer judge has against it (``AcceptedBefore``).

Unknown fields (a newer CRD's) are dropped with a warning in the condition. Counts come from the pools.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from xpyd_operator.api.durations import seconds
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.status import Condition, ServiceStatus
from xpyd_operator.errors import UnsupportedField, XpydError
from xpyd_operator.kube.client.cache import Entry, WatchCache
from xpyd_operator.kube.keys.key import KnownKey
from xpyd_operator.kube.keys.keychoice import KeyChoice
from xpyd_operator.kube.objects.children import Children
from xpyd_operator.kube.objects.dryrun import DryRun
from xpyd_operator.kube.podstate.facts import facts
from xpyd_operator.kube.reports.status_writer import read
from xpyd_operator.plan.counts import Counts, counts, target
from xpyd_operator.plan.desired import DesiredService, Revision
from xpyd_operator.render.compare import differs
from xpyd_operator.render.engine import adapter_order
from xpyd_operator.render.gang import Gang, InstanceGroups, add_groups, joined_by, pod_group
from xpyd_operator.render.judge import Judgement, judge
from xpyd_operator.render.labels import INSTANCE_OF, router_name
from xpyd_operator.render.objects import policies, router_deployment, routers_apart
from xpyd_operator.render.pod import engine_pods, pod_revision
from xpyd_operator.render.settings import KubeSettings
from xpyd_operator.render.switch import NEVER, pods_difference, same_places
from xpyd_sidecar.contract.ids import InstanceName, Role, ServiceName

logger = logging.getLogger(__name__)
Body = dict[str, Any]
FAULTS_MAX = 20


class DocumentRefused(XpydError):
    """The document cannot be followed, and there is none before it that could be."""


def judge_body(body: Body) -> Judgement:
    """Judge a watched document: unknown fields are those of a newer version, and ignored."""
    document = {key: part for key, part in body.items() if key != "status"}
    return judge(document, Target.KUBERNETES, strict=False)


def accepted_before(entry: Entry) -> bool:
    """Whether the status says that this very document was accepted, by this operator or one before it."""
    generation = entry.body["metadata"].get("generation")
    conditions = read(entry.body, ServiceStatus).conditions
    valid = next((each for each in conditions if each.type == "Valid"), None)
    return valid is not None and valid.status == "True" and valid.observed_generation == generation is not None


class KubeBlueprint:
    """Of one service. ``service`` is the document in force, ``valid`` what is said of the newest one."""

    def __init__(
        self, cache: WatchCache, children: Children, keys: KeyChoice, dry_run: DryRun, settings: KubeSettings
    ) -> None:
        self._cache = cache
        self._settings = settings
        self._no_switch = ""
        self._same_places = False
        self._counts_since = 0.0
        """Since when the counts are what they are. After a start of the operator a surplus waits once more."""
        self._suspended_since = 0.0
        self._children = children
        self._keys = keys
        self._dry_run = dry_run
        self._judged: tuple[tuple[str, object], Judgement] | None = None
        self._service: DisaggService | None = None
        self.valid = Condition(type="Valid", status="Unknown", reason="NotSeen")
        self.warnings: tuple[tuple[str, str], ...] = ()
        """What engines would not do of the document in force."""
        self.revisions: dict[Role, Revision] = {}
        """Of the document in force."""
        self.counts: Counts | None = None
        self.generation: int | None = None
        """Of the document that was considered last, in force or refused."""
        self.generations: dict[Role, int] = {}
        """Of the pools as they were counted."""

    @property
    def service(self) -> DisaggService:
        """The document in force. Raises DocumentRefused without one."""
        if self._service is None:
            raise DocumentRefused(self.valid.message or "no document was accepted yet")
        return self._service

    def pods_of(
        self, instance: InstanceName, role: Role, revision: Revision, together: InstanceGroups
    ) -> tuple[Body, ...]:
        """The pods of an instance of the document in force, the leader's first, in the groups of ``together``.

        Raises:
            XpydError: this revision of the role is not in force any more.
        """
        if self.revisions.get(role) != revision:
            raise XpydError(f"{instance} was planned of {revision}, which is not in force any more")
        key = self._keys.wanted.pod if self._keys.wanted is not None else None
        return add_groups(engine_pods(self.service, role, instance, revision, self._settings, key=key), together)

    def group_of(self, pods: Sequence[Body], together: InstanceGroups) -> tuple[Gang, Body] | None:
        """What a scheduler is told of the pods of an instance; None: nothing."""
        gang, leader = together.gang, pods[0]
        if gang is None or joined_by(leader) != gang.kind:
            return None
        return gang, self.pod_group(gang, leader["metadata"]["labels"][INSTANCE_OF], len(pods))

    def pod_group(self, gang: Gang, instance: InstanceName, size: int) -> Body:
        """The group of an instance of so many pods."""
        return pod_group(gang, self.service, instance, size)

    async def desired_service(self, entry: Entry, now: float) -> DesiredService:
        """For the planner.

        Raises:
            DocumentRefused: neither this document nor one before it can be followed.
            KeyTrouble: the key of its pods cannot be told.
            XpydError: it cannot be told at present.
        """
        await self._consider(entry, now)
        self.generation = entry.body["metadata"].get("generation")
        service = self.service
        spec = service.spec
        pools = self._pools(service)
        found = Counts(0, 0) if spec.suspend else counts(service, pools)
        if self.counts is None or (self.counts.prefill, self.counts.decode) != (found.prefill, found.decode):
            self._counts_since = now
        self.counts = found
        one_by_one = spec.prefill.scaling is not None and spec.decode.scaling is not None
        if not spec.suspend:
            self._suspended_since = 0.0
        elif not self._suspended_since:
            self._suspended_since = now
        targets = {role: target(found.count_of(role), self.revisions[role], spec.rollout, spec.role(role).parallelism.pods)
                   for role in Role}
        return DesiredService(
            service=ServiceName(service.name),
            prefill=targets[Role.PREFILL],
            decode=targets[Role.DECODE],
            router=None,
            drain_timeout_s=spec.drain.timeout_s,
            startup_timeout_s=seconds(spec.engine.startup_timeout),
            max_sidecars=spec.router.most_sidecars if spec.router.placement == "sidecar" else 0,
            keep_terminating=False,
            switches=not self._no_switch,
            same_places=self._same_places,
            no_switch="" if self._no_switch == NEVER else self._no_switch,
            switch_window_s=spec.rollout.switch_window_s,
            counts_since=self._counts_since if one_by_one and found.decode else 0.0,  # nobody wants what both give up
            held=found.held,
            limited=found.limited,
            decode_first=spec.to_zero and spec.router.on_no_prefill == "decode",
            adapters=adapter_order(service),
            suspended_since=self._suspended_since,
        )

    async def _consider(self, entry: Entry, now: float) -> None:
        judged = self._judge(entry)
        refused = _listed(judged.refusals)
        if judged.service is None or (refused and not accepted_before(entry)):
            self._refuse("Invalid" if judged.faults else "Unsupported", refused)
            return
        service = judged.service
        key = await self._keys.choose(service, lambda of, role: pod_revision(service, role, of), now)
        revisions = {role: pod_revision(service, role, key.pod.id) for role in Role}
        for role in Role:
            if service is self._service and self.revisions == revisions:
                break
            if words := await self._tried(service, role, revisions[role], key, now):
                self._refuse("TemplateRejected", f"the API server refuses a pod of {role}: {words}")
                return
        if service is not self._service and (words := await self._tried_policies(service, now)):
            self._refuse("TemplateRejected", f"the API server refuses a NetworkPolicy of spec.networkPolicy: {words}")
            return
        if service is not self._service and (words := await self._tried_router(service, now, key)):
            self._refuse("TemplateRejected", f"the API server refuses a pod of a router: {words}")
            return
        if service is not self._service:
            self._no_switch = pods_difference(service, self._settings)
            self._same_places = same_places(service, self._settings)
        self._service, self.revisions = service, revisions
        kinds = (("EngineWouldRefuse", judged.starts), ("AddressCutOff", judged.cut_off))
        self.warnings = tuple((kind, str(each)) for kind, found in kinds for each in found[:FAULTS_MAX])
        before = f"followed until it changes, as it was accepted before; new ones like it are refused: {refused}"
        said = {"AcceptedBefore": before if refused else "", "UnknownFields": _listed(judged.ignored)}
        reason = next((name for name, words in said.items() if words), "Valid")
        message = "; ".join(words for words in said.values() if words) or "the document is followed"
        self.valid = Condition(type="Valid", status="True", reason=reason, message=message)

    def _judge(self, entry: Entry) -> Judgement:
        at = (entry.uid, entry.body["metadata"].get("generation"))
        if self._judged is None or self._judged[0] != at:
            started = time.perf_counter()
            judged = judge_body(entry.body)
            self._judged = (at, judged)
            logger.debug("judged %s/%s in %.4f s", entry.namespace, entry.name, time.perf_counter() - started)
        return self._judged[1]

    def _refuse(self, reason: str, message: str) -> None:
        condition = Condition(type="Valid", status="False", reason=reason, message=message)
        if condition != self.valid:
            logger.warning("document refused (%s): %s", reason, message)
        self.valid = condition

    async def _tried(self, service: DisaggService, role: Role, revision: Revision, key: KnownKey, now: float) -> str:
        """What the API server has against pods of this revision, where some are wanted and none exists. Those of a
        suspended service are tried when it is resumed, so that what is wrong with them never keeps it running.
        """
        if service.spec.role(role).max_instances == 0 or service.spec.suspend:
            return ""
        for pod in self._cache.of_service("Pod", service.metadata.namespace or "", service.name):
            fact = pod.derive(facts)
            if fact.owner == service.metadata.uid and fact.revision == revision and fact.role is role:
                self._dry_run.accept(role, revision)
                return ""
        try:
            return await self._dry_run.ask(service, role, revision, now, key.pod)
        except UnsupportedField as error:
            return str(error)

    async def _tried_policies(self, service: DisaggService, now: float) -> str:
        """What the API server has against the policies of a document, where not all of them are there already."""
        namespace = service.metadata.namespace or ""
        for wanted in policies(service, self._settings):
            there = self._cache.get("NetworkPolicy", namespace, wanted["metadata"]["name"])
            if there is None or differs(wanted["spec"], there.body["spec"]):
                return await self._dry_run.ask_policies(service, now)
        return ""

    async def _tried_router(self, service: DisaggService, now: float, key: KnownKey) -> str:
        """The same of a router's pod, where the document says what it is like, and none like it exists."""
        router = service.spec.router
        if not routers_apart(service) or (service.spec.router_template is None and router.resources is None):
            return ""
        there = self._cache.get("Deployment", service.metadata.namespace or "", router_name(service.name))
        try:
            like = router_deployment(service, self._settings, key.pod)
            if there is not None and not differs(like["spec"], there.body["spec"]):
                return ""
            return await self._dry_run.ask_router(service, now, key.pod)
        except UnsupportedField as error:
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


def _listed(words: Sequence[object]) -> str:
    more = len(words) - FAULTS_MAX
    return "; ".join([*map(str, words[:FAULTS_MAX]), *([f"and {more} more"] if more > 0 else [])])
