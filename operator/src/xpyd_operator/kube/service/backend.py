"""The backend of a cluster: actions become pods, and what is observed comes from the watches and the routers.

Everything is read from the cache. Each write goes in there with its answer, so that the next round sees it; a write that
finds its object gone or changed is no error, since the watch tells and the next round plans on that.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial

import msgspec

from xpyd_operator.errors import ServiceGone, XpydError
from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.client.backoff import Holds
from xpyd_operator.kube.client.cache import OWNER_KIND, Entry
from xpyd_operator.kube.client.work import in_turn
from xpyd_operator.kube.gangs.podgroups import PodGroups
from xpyd_operator.kube.keys.key import ServiceKeys
from xpyd_operator.kube.keys.keychoice import KeyChoice
from xpyd_operator.kube.keys.master import KeyTrouble
from xpyd_operator.kube.objects.blueprint import KubeBlueprint
from xpyd_operator.kube.objects.children import Children
from xpyd_operator.kube.objects.dryrun import DryRun
from xpyd_operator.kube.objects.pods import Pods, in_groups, make_whole, pods_of_wanted
from xpyd_operator.kube.objects.presence import Presence
from xpyd_operator.kube.podstate.facts import Facts, facts
from xpyd_operator.kube.podstate.outdated import mark_outdated
from xpyd_operator.kube.reports.status import gang_problems, service_wide
from xpyd_operator.kube.routers.adapters import AdapterOrders
from xpyd_operator.kube.routers.fleet import Fleets
from xpyd_operator.kube.routers.observe import RouterAnswers, front, instances, picture
from xpyd_operator.kube.routers.routers import absent_routers, running_routers
from xpyd_operator.kube.routers.switches import Switches
from xpyd_operator.kube.scaling.planning import PoolPlanner
from xpyd_operator.kube.service.gateway import ServiceGateway
from xpyd_operator.kube.service.prefetch import ServicePrefetch
from xpyd_operator.kube.service.report import ServiceReport
from xpyd_operator.kube.service.shared import SharedParts
from xpyd_operator.plan.absent import Absence
from xpyd_operator.plan.actions import Action, Create, Drain, Label, Remove, Switch
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import ObservedService
from xpyd_operator.plan.round import Round
from xpyd_operator.render import labels
from xpyd_operator.render.gang import InstanceGroups
from xpyd_operator.render.objects import spans
from xpyd_sidecar.contract.ids import Role, ServiceName
from xpyd_sidecar.contract.keys import ServiceKey


class KubeBackend:
    """Of one DisaggService, by its uid: one of the same name made later is another one. ``wake``: begin a round soon."""

    def __init__(self, shared: SharedParts, entry: Entry, wake: Callable[[], None] = lambda: None) -> None:
        self.namespace, self.name, self.uid = entry.namespace, entry.name, entry.uid
        self.last: Round | None = None
        self.holds = Holds()
        self._shared = shared
        self._cache, self._settings = shared.cache, shared.settings
        self._children = Children(shared.api, shared.cache, shared.events, shared.settings)
        self._keys = ServiceKeys(shared.api, shared.master, dry_run=shared.settings.dry_run)
        self._dry_run = DryRun(shared.api, shared.settings)
        self._choice = KeyChoice(shared.cache, self._keys, shared.turns)
        self._blueprint = KubeBlueprint(shared.cache, self._children, self._choice, self._dry_run, shared.settings)
        self._fleets = Fleets(shared.session, timeout_s=shared.settings.fleet_timeout_s)
        self._planner = PoolPlanner(shared.events, shared.metrics, self._fleets, self._children, woken=wake)
        self._gateway, self._prefetch = ServiceGateway(shared, entry), ServicePrefetch(shared, entry)
        self._report = ServiceReport(shared, self._blueprint, self._children, self.holds)
        self._told = RouterAnswers()
        self._named: list[str] = []  # objects of others whose names we need, as the last round knew them
        self._groups = PodGroups(shared.api, entry, self.holds)
        self._pods = Pods(shared.api, shared.cache, entry, self.holds, self._groups)
        self._presence = Presence(shared.cache, shared.settings, keys=self._keys, choice=self._choice, groups=self._groups,
                                  pods=self._pods)
        self._switches = Switches(shared.api, shared.cache, entry, shared.session, timeout_s=self._settings.fleet_timeout_s)
        self._adapters = AdapterOrders(shared.session, entry, timeout_s=self._settings.fleet_timeout_s)
        self._switching = False
        self._several = False  # there are instances of several pods
        self._before = False  # there are pods of a service of this name that was deleted
        self._place_after = 0.0  # when such instances are made again (``Remove.pause_s``)
        self._placed: frozenset[str] = frozenset()  # uids of pods that have a node
        self._freed = 0.0  # when one of them was gone
        self._waits_until = 0.0  # when a surplus has waited long enough for the other role to want it

    # What is wanted

    async def desired_service(self) -> DesiredService:
        """What the watched document and the pools ask for; a document that cannot be followed shows in the status at once.

        Raises:
            ServiceGone: the service is not there any more.
            KeyTrouble: the key of its pods cannot be told, so nothing is done.
            XpydError: it cannot be told, and nothing before was accepted.
        """
        entry = self._entry()
        try:
            found = await self._blueprint.desired_service(entry, self._shared.clock())
            if spans(self._blueprint.service):
                await self._shared.gangs.refresh(self._shared.clock())
            gang = self._shared.gangs.chosen_gang is not None
            return msgspec.structs.replace(found, uid=self.uid, place_after=self._place_after, gang=gang)
        except KeyTrouble as error:
            if not self._settings.dry_run:
                self._report.write_key_problem(entry, error)
            raise
        except XpydError as error:
            if self.last is None and not self._settings.dry_run:
                self._report.write_refusal(entry, error)
            raise

    # What is there

    async def observe(self, now: float) -> ObservedService:
        """Pods from the cache, and what a router tells; takes at most the routers' timeout."""
        service = self._blueprint.service
        pods = self._cache.of_service("Pod", self.namespace, self.name)
        seen = [pod.derive(facts) for pod in pods]
        mine = [each for each in seen if each.owner == self.uid]
        on_their_own = service.spec.router.placement == "deployment"
        suspended = service.spec.suspend
        away = self._away(pods, now) if on_their_own and not suspended else None
        routers = [e for e in seen if e.component == labels.ROUTERS] if on_their_own else [e for e in mine if e.router]
        learners = [] if on_their_own else [each for each in mine if each.roster and not each.router]
        counts = self._blueprint.counts
        prefill, decode = counts is None or counts.prefill > 0, counts is None or counts.decode > 0
        self._told = await self._fleets.ask(
            [each for each in routers if each.usable],
            [each for each in learners if each.usable],
            self._key_of,
            now,
            limit=service.spec.router.most_sidecars + 1,
            tls=service.spec.router.tls.secret is not None,
            picture=picture(seen, now),
            prefill=prefill,
        )
        found = instances(ServiceName(service.name), self.uid, pods, self._told, now, taken=self._pods.taken_names(now),
                          current=self._blueprint.revisions.values(), limit_s=service.spec.engine.startup_timeout_s)
        self._several = any(each.member is not None for each in mine)
        self._before = any(each.owner != self.uid and each.component == labels.ENGINE for each in seen)
        found = mark_outdated(found, pods, self._settings.sidecar_image, now)
        self._switching = any(each.switching for each in mine)
        self._planner.observe(self._told.fleet, found, [each for each in routers if each.usable], now)
        self._named = self._taken
        placed = frozenset(each.uid for each in mine if each.placed)
        self._freed, self._placed = now if self._placed - placed else self._freed, placed
        clients = f"Service {service.name}"
        return ObservedService(
            found,
            front=front(routers, self._told, prefill=prefill, decode=decode,
                        taken=clients if clients in self._named else "", away=away),
            fleet_known=self._told.fleet is not None,
            disaggregation=self._told.fleet.disaggregation if self._told.fleet is not None else None,
            routers=running_routers(seen) if suspended else (), freed=self._freed,
            absent=(
                *service_wide(self._named, self._blueprint.valid, self._shared.master.problem),
                *(gang_problems(self._shared.gangs, left_out=self._pods.ungrouped)
                  if spans(service) and not suspended else ()),
                *(await self._shared.topology.absent(service, now) if not suspended else ()),
                *(away or ()),
            ),
        )

    @property
    def hurried(self) -> bool:
        """Something is on its way that no watch tells of: look again soon."""
        waits = self._shared.clock() < max(self._waits_until, self._place_after)
        return self._fleets.hurried or self._switching or self._adapters.waits or waits or self._named != self._taken

    @property
    def _taken(self) -> list[str]:
        return [*self._children.taken_names, *self._groups.taken_names]

    def _key_of(self, pod: Facts) -> ServiceKey | None:
        return self._keys.service_key(pod.key)

    def _away(self, pods: list[Entry], now: float) -> tuple[Absence, ...]:
        """Why routers in pods of their own are not there."""
        name = labels.router_name(self.name)
        deployment = self._cache.get("Deployment", self.namespace, name)
        mine = [pod for pod in pods if pod.derive(facts).component == labels.ROUTERS]
        limit_s = self._blueprint.service.spec.engine.startup_timeout_s
        return absent_routers(name, deployment.body if deployment is not None else None, mine, now, limit_s)

    # What is done

    @property
    def width(self) -> int:
        """Requests side by side."""
        return self._settings.width

    async def prepare(self, round_: Round) -> None:
        """Everything that goes with the service beside new instances. A step that fails holds up none of the others: what
        may not be made without what it would have made is not made (``kube.objects.presence``).
        """
        self._entry()
        service, now = self._blueprint.service, self._shared.clock()
        gangs, desired = self._shared.gangs, round_.desired
        wanted = {role: desired.target(role).replicas for role in Role}
        lacking = partial(self._presence.lacking, service)
        self._waits_until = desired.counts_since + desired.switch_window_s + 1.0 if desired.counts_since else 0.0

        async def ends() -> None:
            if self._several:
                await self._pods.end_together()

        async def key() -> None:
            making = any(isinstance(action, Create) for action in round_.plan.actions)
            if self._choice.wanted is not None:
                await self._keys.provide(service, self._choice.wanted, self._choice.used, now, soon=making)

        async def children() -> None:
            key = self._choice.of_routers(service)
            await self._children.reconcile(service, wanted, now, key, lacking=lacking, several=self._several,
                                           before=self._before, pods=pods_of_wanted(service, round_))

        async def beside() -> None:
            await self._gateway.reconcile(service, now)
            await self._prefetch.reconcile(service, sum(wanted.values()), now)

        async def groups() -> None:
            if self._several or self._groups.has_groups:
                alive = in_groups(self._pods, gangs, round_)
                await self._groups.reconcile(gangs.served, alive, self._blueprint.pod_group, now)

        async def whole() -> None:
            if self._several and not desired.suspended_since:
                await make_whole(self._pods, self._blueprint, gangs, round_, now, lacking=lacking)

        async def agents() -> None:
            await self._switches.reconcile(self._told.fleet, self._key_of)
            pods = [pod.derive(facts) for pod in self._cache.of_service("Pod", self.namespace, self.name)]
            await self._adapters.distribute(desired.adapters, pods, self._told.fleet, self._key_of, now)

        async def planner() -> None:
            planned = (wanted[Role.PREFILL], wanted[Role.DECODE])
            failures = self.last.failures[:1] if self.last else ()
            await self._planner.decide(self._entry(), service, planned, self._key_of, now=now, failed=" ".join(failures),
                                       held_up=" ".join(each.message for each in self.holds.waiting))

        await in_turn((ends, key, children, beside, groups, whole, agents, planner), lambda error: (
            isinstance(error, ApiError) and self.holds.excuses(error, "what goes with the service", now)))

    async def apply(self, action: Action) -> None:
        """Carry out one action.

        Raises:
            ApiError: the API server refuses, or does not answer.
            NotYet: what it would make needs something that is not there.
            XpydError: the action has no meaning here.
        """
        self._entry()
        match action:
            case Create():
                # Kueue remembers what has ended by its name, which the planner gives again.
                together = InstanceGroups(self._shared.gangs.chosen_gang, f"{action.instance}-{secrets.token_hex(3)}")
                made = self._blueprint.pods_of(action.instance, action.role, action.revision, together)
                await self._pods.create(made, self._shared.clock(), self._blueprint.group_of(made, together),
                                        partial(self._presence.lacking, self._blueprint.service))
            case Drain() | Remove():
                if isinstance(action, Remove) and action.pause_s:
                    self._place_after = self._shared.clock() + action.pause_s
                await self._pods.delete(action.instance)
            case Switch():
                await self._switches.assign(action, self._key_of, self._shared.clock())
            case Label():
                await self._pods.label(action)
            case _:
                raise XpydError(f"pods know no such thing: {action}")

    def report(self, round_: Round) -> None:
        """Write the status where it differs, and Events for what is new."""
        entry = self._cache.get(OWNER_KIND, self.namespace, self.name)
        if entry is None or entry.uid != self.uid or entry.deleting:
            return
        self._choice.on_round(round_)
        if not any(isinstance(action, Create) for action in round_.plan.actions):
            self.holds.clear(self._shared.clock())
        self._report.write(entry, round_, self.last, self._planner.sentence, gateway=self._gateway.condition(),
                           prefetch=self._prefetch.condition())
        self.last = round_

    def forget(self) -> None:
        """The service is gone: nobody waits for it to have its new key, or looks at its gateways."""
        self._gateway.forget()
        self._shared.turns.give_back(self.uid)

    async def close(self) -> None:
        """Write what was said, as far as that goes in time."""
        self._fleets.close()
        await self._planner.close()
        await self._report.close()

    def _entry(self) -> Entry:
        entry = self._cache.get(OWNER_KIND, self.namespace, self.name)
        if entry is None or entry.uid != self.uid or entry.deleting:
            raise ServiceGone(f"{self.namespace}/{self.name} is being deleted")
        return entry
