"""Looks at every change of the pods of a service, as a watch shows them, and keeps what should never have been.

    dog = Watchdog(team, floors={"decode": 3}, most={"decode": 4})
    …
    await dog.end()
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Mapping

from kube_client import Object
from kube_team import Team
from kube_watched import label
from node_agent import ROLE, SERVICE

ROLES = ("prefill", "decode")
_ORDINAL = re.compile(r"-e(0|[1-9]\d*)")


class Watchdog:
    """``floors``: least ready pods of a role; ``most``: most pods of a role when one is made, ending ones included.

    ``deaths``: pods die at any moment, so that Ready may turn true of a router that has died since.
    """

    def __init__(self, team: Team, name: str = "qwen", floors: Mapping[str, int] | None = None,
                 most: Mapping[str, int] | None = None, *, deaths: bool = False) -> None:
        self.faults: list[str] = []
        self.seen = 0
        self.made: list[str] = []
        """Names of the pods that were made, in order."""
        self.pairless = 0
        """Changes after which no prefill and decode of one fingerprint were ready."""
        self.floors = dict(floors or {})
        self.most = dict(most or {})
        self._team = team
        self._name = name
        self._began = time.monotonic()
        team.mirrors["Pod"].listeners.append(self._on_pod)
        self._deaths = deaths
        self._looks: set[asyncio.Task[None]] = set()
        team.mirrors["DisaggService"].listeners.append(self._on_service)

    def check(self) -> None:
        """Fails with everything that was wrong."""
        assert self.seen, "nothing was watched"
        assert not self.faults, "\n".join([*self.faults[:20], self._team.describe()])

    async def end(self) -> None:
        """Check, with what is still looked at, and look no longer."""
        self._team.mirrors["Pod"].listeners.remove(self._on_pod)
        self._team.mirrors["DisaggService"].listeners.remove(self._on_service)
        await asyncio.gather(*self._looks)
        self.check()

    def _fault(self, words: str) -> None:
        self.faults.append(f"{time.monotonic() - self._began:.2f} s: {words}")

    def _on_pod(self, was: Object | None, now: Object | None) -> None:
        pod = now or was
        if pod is None or label(pod, SERVICE) != self._name or not label(pod, ROLE):
            return
        self.seen += 1
        for role, floor in self.floors.items():
            ready = self._team.ready(self._name, role)
            if len(ready) < floor:
                self._fault(f"{len(ready)} of at least {floor} {role} pods are ready: {ready}")
        if not self._pair():
            self.pairless += 1
        if was is None and now is not None:
            self.made.append(now["metadata"]["name"])
            self._on_new(now)

    def _on_new(self, pod: Object) -> None:
        metadata = pod["metadata"]
        role, name = label(pod, ROLE), metadata["name"]
        if not _ORDINAL.fullmatch(name, len(self._name)) or not name.startswith(self._name):
            self._fault(f"a pod is named {name}")
        owners = [each for each in metadata.get("ownerReferences") or () if each.get("controller")]
        service = self._team.of("DisaggService").get(self._name)
        if len(owners) != 1 or (service is not None and owners[0]["uid"] != service["metadata"]["uid"]):
            self._fault(f"{name} is owned by {owners}")
        if metadata.get("finalizers"):
            self._fault(f"{name} has finalizers {metadata['finalizers']}")
        count = len(self._team.pods(self._name, role))
        if role in self.most and count > self.most[role]:
            self._fault(f"{count} {role} pods exist with {name}, at most {self.most[role]} may")

    def _on_service(self, was: Object | None, now: Object | None) -> None:
        """Ready turns true only when a router that clients reach can pick."""
        if now is None or now["metadata"]["name"] != self._name or self._deaths:
            return
        if _says_ready(now) and not (was is not None and _says_ready(was)) and not self._team.agent.can_answer(self._name):
            look = asyncio.get_running_loop().create_task(self._look_again())
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)

    async def _look_again(self) -> None:
        """The agent of the pods has a watch of its own, which may be behind: the label of the router came before."""
        try:
            await self._team.agent.catch_up()
        except TimeoutError:
            self._fault("the watch of the pods' agent stays behind")
        service = self._team.of("DisaggService").get(self._name)
        if service is not None and _says_ready(service) and not self._team.agent.can_answer(self._name):
            self._fault("Ready turned true and no router could answer a client")

    def _pair(self) -> bool:
        """A request can be served: prefill and decode of one fingerprint."""
        found = []
        for role in ROLES:
            lives = self._team.agent.engines(self._name, role)
            serving = [life for life in lives if life.facts.stage == "ready" and not life.ending]
            found.append({self._team.agent.fingerprint(life.pod) for life in serving})
        return bool(found[0] & found[1])


class Bounds:
    """Most pods of each role over the last ``window_s``: an operator may still act on what was asked for a moment ago."""

    def __init__(self, dog: Watchdog, surge: int, window_s: float) -> None:
        self._dog = dog
        self._surge = surge
        self._window_s = window_s
        self._asked: deque[tuple[float, dict[str, int]]] = deque()

    def ask(self, **counts: int) -> None:
        """The spec asks for these counts from now on."""
        now = time.monotonic()
        self._asked.append((now, counts))
        while len(self._asked) > 1 and self._asked[1][0] < now - self._window_s:
            self._asked.popleft()
        for role in counts:
            self._dog.most[role] = max(each[role] for _, each in self._asked) + self._surge


def _says_ready(service: Object) -> bool:
    conditions = (service.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
