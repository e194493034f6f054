"""No pod without its policies, its Secret and its group, ever: single requests fail at random, people edit and delete, and
what is there is judged at the very moment at which a pod, or what makes pods, is written.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from random import Random
from typing import Any

import aiohttp
import pytest
from kube_documents import UID
from memory_world import MemoryWorld
from more_cases import more
from node_agent import MEMBER, MEMBERS

from xpyd_operator.kube.client.api import ApiError
from xpyd_operator.kube.keys.master import KeyTrouble
from xpyd_operator.kube.objects.blueprint import DocumentRefused
from xpyd_operator.render.labels import SERVICE_UID

Body = dict[str, Any]
GANG = "scheduling.k8s.io/v1beta1"
TWO = {"replicas": 1, "parallelism": {"tensor": 2, "pods": 2, "device": "none"}}
SPECS: tuple[dict[str, Any], ...] = (
    {"prefill": {"replicas": 1, "resources": {}}, "decode": {"replicas": 2, "resources": {}}},
    {"prefill": {"replicas": 1, "resources": {}}, "decode": TWO | {"replicas": 2}},
    {"prefill": TWO, "decode": TWO, "router": {"placement": "deployment", "replicas": 2}},
)
REFUSALS: tuple[Callable[[], ApiError], ...] = (
    lambda: ApiError(403, "Forbidden", 'admission webhook "validate.policies" denied the request: no such egress'),
    lambda: ApiError(403, "Forbidden", "cannot create resource: no right"),
    lambda: ApiError(403, "Forbidden", "exceeded quota: small"),
    lambda: ApiError(0, "Timeout", "no answer within 10 s"),
    lambda: ApiError(500, "InternalError", "etcdserver: request timed out"),
    lambda: ApiError(409, "Conflict", "the object has been modified"),
    lambda: ApiError(422, "Invalid", "spec.egress: field not declared in schema"),
)
LOST = ApiError(0, "Timeout", "no answer within 10 s")
WRITES = ("create", "apply", "patch", "delete")


class Storm:
    """A world whose requests fail by ``fails``, and who writes a pod into which fence."""

    def __init__(self, session: aiohttp.ClientSession, spec: dict[str, Any], fails: Callable[[str, str, str], str]) -> None:
        self.world = MemoryWorld(session)
        self.world.api.resources = {GANG: frozenset({"podgroups"})}
        self.fails, self.failures, self.judged = fails, 0, 0
        self.faults: list[str] = []
        self.policies: dict[str, Body] = {}
        """Their specs in a world in which nothing fails."""
        api = self.world.api
        self._put, api.put = api.put, self._judge  # type: ignore[method-assign]
        api.fault = self._before
        for verb in WRITES:
            setattr(api, verb, self._losing(verb, getattr(api, verb)))
        self.world.write(**spec)

    def _before(self, verb: str, kind: str, name: str) -> ApiError | None:
        how = self.fails(verb, kind, name)
        if how in ("", "lost"):
            return None
        self.failures += 1
        return REFUSALS[int(how)]()

    def _losing(self, verb: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        async def asked(kind: str, namespace: str, what: Any, *more: Any, **named: Any) -> Body:
            answer: Body = await ask(kind, namespace, what, *more, **named)
            name = what if isinstance(what, str) else what["metadata"]["name"]
            if self.fails(verb, kind, name) == "lost":
                self.failures += 1
                raise LOST
            return answer

        return asked

    def _judge(self, kind: str, body: Body) -> Body:
        """As the API server writes it."""
        new = (kind, body["metadata"].get("namespace", ""), body["metadata"]["name"]) not in self.world.api.objects
        if kind == "Deployment" or (kind == "Pod" and new):
            self.judged += 1
            self.faults += [f"{kind} {body['metadata']['name']}: {each}" for each in self._holes(body)]
        return self._put(kind, body)

    def _holes(self, body: Body) -> list[str]:
        objects = self.world.api.objects
        found = []
        for name in ("qwen", "qwen-clients"):
            policy = objects.get(("NetworkPolicy", "team-a", name))
            if policy is None or policy["metadata"].get("deletionTimestamp"):
                found.append(f"no NetworkPolicy {name}")
            elif policy["metadata"]["labels"].get(SERVICE_UID) != UID or policy["metadata"].get("ownerReferences"):
                found.append(f"NetworkPolicy {name} will not stay")
            elif self.policies and policy["spec"] != self.policies[name]:
                found.append(f"NetworkPolicy {name} is another one")
        spec, meta = body["spec"].get("template", body)["spec"], body["metadata"]
        secret = next(each["secret"]["secretName"] for each in spec["volumes"] if each["name"] == "key")
        if ("Secret", "team-a", secret) not in objects:
            found.append(f"no Secret {secret}")
        group = (spec.get("schedulingGroup") or {}).get("podGroupName")
        if group and not any(at[0].startswith("PodGroup") and at[2] == group for at in objects):
            found.append(f"no PodGroup {group}")
        if meta["labels"].get(MEMBER) == "0":
            others = (f"{meta['name'][:-1]}{index}" for index in range(1, int(meta["annotations"][MEMBERS])))
            found += [f"no pod {name}" for name in others if ("Pod", "team-a", name) not in objects]
        return found

    async def round(self) -> None:
        """One, and what kubelets do after it."""
        # the key, what is served, or a dry run could not be told
        with contextlib.suppress(ApiError, KeyTrouble, DocumentRefused):
            await self.world.round()
        self.world.run_pods()
        self.world.now += 6

    def meddle(self, random: Random) -> None:
        """As people and nodes do. Secrets stay: none is watched, and a pod whose Secret went a moment ago only waits."""
        objects, cache = self.world.api.objects, self.world.cache
        mine = [at for at in objects if at[0] in ("NetworkPolicy", "Pod", "Deployment", "Service")]
        if not mine or random.random() < 0.4:
            return
        at = random.choice(sorted(mine))
        if at[0] == "NetworkPolicy" and random.random() < 0.5:
            opened = copy.deepcopy(objects[at])
            opened["spec"]["ingress"] = [{}]
            cache.on_seen(at[0], self._put(at[0], opened))
            return
        cache.on_deleted(at[0], objects.pop(at))


async def calm(session: aiohttp.ClientSession, spec: dict[str, Any]) -> Storm:
    """A world in which nothing fails, after its service was made."""
    storm = Storm(session, spec, lambda *_: "")
    for _ in range(6):
        await storm.round()
    assert not storm.faults
    return storm


def specs_of(storm: Storm) -> dict[str, Body]:
    return {at[2]: body["spec"] for at, body in storm.world.api.objects.items() if at[0] == "NetworkPolicy"}


async def check_healed(storm: Storm, made: Storm) -> None:
    """Nothing fails any more: everything is made, so that what was held back was held back for the failures alone."""
    storm.fails = lambda *_: ""
    for _ in range(14):
        storm.world.now += 60
        await storm.round()
    kinds = ("Pod", "NetworkPolicy", "Deployment", "Service")
    there, wanted = ({(at[0], at[2]) for at in each.world.api.objects if at[0] in kinds} for each in (storm, made))
    assert {at for at in there if at[0] != "Pod"} == {at for at in wanted if at[0] != "Pod"}
    assert len(there) == len(wanted)


@pytest.mark.parametrize("spec", [SPECS[0], *more(SPECS[1:])], ids=["pods", "groups", "apart"])
async def test_each_single_request_that_fails_for_good_leaves_no_pod_without_its_fence(spec: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as session:
        made = await calm(session, spec)
        calls = sorted({each for each in made.world.api.asked if each[0] in (*WRITES, "get", "list", "dry-run")})
        for call in calls:
            for how in ("0", "3", "lost"):
                storm = Storm(session, spec, lambda *asked, call=call, how=how: how if asked == call else "")  # type: ignore[misc]
                storm.policies = specs_of(made)
                for _ in range(4):
                    await storm.round()
                assert not storm.faults, (call, how)
        assert len(calls) > 12


@pytest.mark.test_all
@pytest.mark.parametrize("spec", SPECS, ids=["pods", "groups", "apart"])
async def test_ten_thousand_requests_that_fail_leave_no_pod_without_its_fence(spec: dict[str, Any]) -> None:
    async with aiohttp.ClientSession() as session:
        made = await calm(session, spec)
        failures = judged = seed = 0
        while failures < 10_000 / len(SPECS):
            random = Random(seed)
            share = random.choice((0.1, 0.4, 0.7))
            hows = [*map(str, range(len(REFUSALS))), "lost", "lost"]
            storm = Storm(session, spec, lambda *_, r=random, s=share, h=hows: r.choice(h) if r.random() < s else "")  # type: ignore[misc]
            storm.policies = specs_of(made)
            for _ in range(8):
                await storm.round()
                storm.meddle(random)
            assert not storm.faults, f"seed {seed}: {storm.faults}"
            if seed % 20 == 0:
                await check_healed(storm, made)
                assert not storm.faults, f"seed {seed}: {storm.faults}"
            failures, judged, seed = failures + storm.failures, judged + storm.judged, seed + 1
        assert judged > 300
        print(f"{seed} worlds, {failures} failures, {judged} pods and Deployments judged")
