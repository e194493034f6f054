"""Conditions: when a service is ready, what is wrong and of whom, in bounded and stable words."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from pod_world import PodWorld, wish

from xpyd_operator.api.operation import Rollout
from xpyd_operator.api.status import Condition
from xpyd_operator.plan.absent import Absence, Breakage, Waiting
from xpyd_operator.plan.conditions import LONGEST, shorten
from xpyd_operator.plan.desired import DesiredService
from xpyd_operator.plan.observed import Instance, ObservedService, Phase
from xpyd_operator.plan.round import think
from xpyd_sidecar.contract import adapters
from xpyd_sidecar.contract.adapters import Adapter, AdapterProblem, AdapterReport
from xpyd_sidecar.contract.ids import InstanceName, Role
from xpyd_sidecar.contract.intake import Disaggregation

ANSWERS: Absence | None = None
UNKNOWN = Waiting("NoRouter", "nothing is known of routers")


def said(want: DesiredService, observed: ObservedService) -> dict[str, Condition]:
    return {one.type: one for one in think(want, observed, 1000.0).status.conditions}


def pod(ordinal: int, role: Role, phase: Phase = Phase.READY, **more: Any) -> Instance:
    settings = {"fingerprint": "f" * 32, **more}
    revision = wish(1, 1).decode.revision
    return Instance(InstanceName(f"qwen-e{ordinal}"), ordinal, role, revision, phase, **settings)


def seen(*instances: Instance, front: Absence | None = ANSWERS, **more: Any) -> ObservedService:
    return ObservedService(instances, front=front, fleet_known=True, **more)


P, D = pod(0, Role.PREFILL), pod(1, Role.DECODE)
ROUTING = pod(1, Role.DECODE, roster=True, router=True, settled=True)


def test_ready_means_that_a_request_is_answered() -> None:
    ready = said(wish(1, 1), seen(P, D))["Ready"]
    assert (ready.status, ready.reason, ready.message) == ("True", "AllReady", "1P1D ready")
    short = said(wish(1, 3), seen(P, D))["Ready"]
    assert (short.status, short.reason, short.message) == ("True", "Serving", "1 of 3 decode instances ready")


@pytest.mark.parametrize(
    ("observed", "reason"),
    [
        (seen(), "Starting"),
        (seen(D), "Starting"),
        (seen(P, pod(1, Role.DECODE, Phase.CRASHED)), "Crashed"),
        (seen(P, D, front=UNKNOWN), "NoRouter"),
        (seen(P, D, front=Waiting("NotSettled", "the roster is not known")), "NotSettled"),
        (seen(P, pod(1, Role.DECODE, fingerprint="b" * 32)), "Incompatible"),
    ],
)
def test_never_ready_before_one_could_be(observed: ObservedService, reason: str) -> None:
    ready = said(wish(1, 1), observed)["Ready"]
    assert (ready.status, ready.reason) == ("False", reason)


def test_without_prefill_wanted_decode_alone_is_ready() -> None:
    out = said(wish(0, 1), seen(D))
    assert out["Ready"].reason == "AllReady"
    assert (out["Compatible"].status, out["Compatible"].reason) == ("True", "DecodeAlone")


def test_degraded_names_three_and_counts_the_rest() -> None:
    why = Breakage("ImagePull", "no such image")
    broken = [pod(n, Role.DECODE, Phase.STARTING, absent=why) for n in range(1, 6)]
    odd = pod(6, Role.DECODE, Phase.CRASHED, absent=Breakage("OutOfMemory", "killed at 80Gi"))
    degraded = said(wish(1, 6), seen(P, *broken, odd))["Degraded"]
    assert (degraded.status, degraded.reason) == ("True", "ImagePull")
    assert degraded.message == (
        "qwen-e1: no such image (ImagePull); qwen-e2: no such image (ImagePull); qwen-e3: no such image (ImagePull); "
        "and 2 more with ImagePull, 1 more with OutOfMemory"
    )


def test_what_passes_by_itself_or_leaves_is_not_degraded() -> None:
    passing = pod(1, Role.DECODE, Phase.STARTING, absent=Waiting("Pulling", "the image is pulled"))
    leaving = pod(2, Role.DECODE, Phase.STOPPING, absent=Breakage("ImagePull", "no such image"))
    assert said(wish(1, 2), seen(P, passing, leaving))["Degraded"].status == "False"


QUEUED = Waiting("Queued", "pod waits to be admitted", place=True)


def test_what_waits_to_be_admitted_is_queued_and_not_degraded() -> None:
    waiting = [pod(n, Role.DECODE, Phase.STARTING, absent=QUEUED) for n in (1, 2)]
    out = said(wish(1, 2, max_sidecars=0), seen(P, *waiting))
    assert (out["Ready"].status, out["Ready"].reason) == ("False", "Queued")
    assert out["Ready"].message == "0 of 2 decode instances ready; queued: qwen-e1, qwen-e2"
    assert (out["Progressing"].status, out["Progressing"].reason) == ("True", "Queued")
    assert out["Progressing"].message == "queued: qwen-e1, qwen-e2"
    assert (out["Degraded"].status, out["Degraded"].reason) == ("False", "Healthy")


def test_beside_what_is_queued_others_are_told() -> None:
    waiting = pod(2, Role.DECODE, Phase.STARTING, absent=QUEUED)
    serving = said(wish(1, 2, max_sidecars=0), seen(P, ROUTING, waiting))
    assert (serving["Ready"].status, serving["Ready"].reason) == ("True", "Serving")
    assert serving["Ready"].message == "1 of 2 decode instances ready; queued: qwen-e2"
    starting = said(wish(1, 2, max_sidecars=0), seen(P, pod(1, Role.DECODE, Phase.STARTING), waiting))
    assert (starting["Ready"].reason, starting["Progressing"].reason) == ("Starting", "Changing")
    pull = pod(1, Role.DECODE, Phase.STARTING, absent=Breakage("ImagePull", "no such image"))
    stuck = said(wish(1, 2, max_sidecars=0), seen(P, pull, waiting))
    assert (stuck["Progressing"].status, stuck["Progressing"].reason) == ("False", "Stuck")
    assert stuck["Degraded"].reason == "ImagePull"
    leaving = pod(2, Role.DECODE, Phase.STOPPING, absent=QUEUED)
    assert "queued" not in said(wish(1, 2, max_sidecars=0), seen(P, ROUTING, leaving))["Ready"].message


def test_a_lost_node_a_crash_loop_and_a_refused_template_are_degraded() -> None:
    lost = pod(2, Role.DECODE, Phase.LOST, absent=Breakage("NodeLost", "node n1 is away"))
    assert said(wish(1, 1), seen(P, D, lost))["Degraded"].message == "qwen-e2: node n1 is away"
    loop = pod(1, Role.DECODE, Phase.STARTING, platform_crashes=4)
    assert said(wish(1, 1), seen(P, loop))["Degraded"].message == "qwen-e1: it crashed 4 times in a row"
    refused = seen(P, D, absent=(Breakage("TemplateRejected", "spec.containers[0].ports"),))
    assert said(wish(1, 1), refused)["Degraded"].reason == "TemplateRejected"


def test_a_name_that_is_soon_free_is_nobodys_trouble() -> None:
    """A pod of a service of this name before, which ends."""
    assert said(wish(1, 1), seen(P, ROUTING, pod(2, Role.DECODE, Phase.LOST)))["Degraded"].status == "False"


def test_compatible_names_the_fingerprints() -> None:
    assert said(wish(1, 1), seen(P, D))["Compatible"].reason == "SameFingerprint"
    assert said(wish(1, 1), seen(P))["Compatible"].status == "Unknown"
    several = said(wish(1, 2), seen(P, D, pod(2, Role.DECODE, fingerprint="b" * 32)))["Compatible"]
    assert (several.status, several.reason) == ("True", "SeveralFingerprints")
    apart = said(wish(1, 1), seen(P, pod(1, Role.DECODE, fingerprint="b" * 32)))["Compatible"]
    assert (apart.status, apart.message) == ("False", f"prefill serves {'f' * 32}, decode {'b' * 32}")


def test_pairs_that_cannot_be_are_named_and_all_of_them_are_no_pair() -> None:
    refusing = pod(1, Role.DECODE, refuses=((P.name, "another model"), (InstanceName("qwen-e9"), "it has gone")))
    alone = said(wish(1, 1), seen(P, refusing))["Compatible"]
    words = "qwen-e1 cannot take KV from qwen-e0: another model"
    assert (alone.status, alone.reason, alone.message) == ("False", "PairsRefused", words)
    beside = said(wish(1, 2), seen(P, refusing, pod(2, Role.DECODE)))["Compatible"]
    assert (beside.status, beside.reason, beside.message) == ("True", "SomePairsRefused", words)
    other = pod(1, Role.DECODE, fingerprint="b" * 32, refuses=((P.name, "another model"),))
    assert said(wish(1, 2), seen(P, other, pod(2, Role.DECODE)))["Compatible"].reason == "SeveralFingerprints"


def test_links_that_could_be_better_are_said_with_whose_they_are() -> None:
    words = "blocks come over tcp: nixl: NIXL cannot be loaded"
    both = said(wish(1, 2), seen(P, pod(1, Role.DECODE, links=(words,)), pod(2, Role.DECODE, links=(words,))))["Compatible"]
    served = f"prefill serves {'f' * 32}, decode {'f' * 32}"
    assert (both.status, both.reason, both.message) == ("True", "SameFingerprint", f"{served}; qwen-e1, qwen-e2: {words}")


def test_messages_are_bounded() -> None:
    long = Breakage("CrashLoop", "x" * 5000)
    out = said(wish(1, 99), seen(P, *(pod(n, Role.DECODE, Phase.CRASHED, absent=long) for n in range(1, 90))))
    assert all(len(condition.message) <= LONGEST for condition in out.values())
    assert "and 86 more with CrashLoop" in out["Degraded"].message
    assert len(shorten("y " * 5000)) == LONGEST
    assert shorten("a\n b") == "a b"


def test_the_same_state_gives_the_same_bytes_at_any_time() -> None:
    world = PodWorld(broken={"r2"})
    world.run(wish(1, 3))
    want = wish(1, 3, "r2")
    for _ in range(30):
        world.tick(want)
    observed = world.observe()
    texts = {msgspec.json.encode(think(want, observed, now).status) for now in (world.now, world.now + 12345.6)}
    assert len(texts) == 1


def test_limits_are_said() -> None:
    out = think(wish(1, 1, held="limits.maxInstances 2 makes 1P3D 1P1D"), seen(P, ROUTING), 0.0).status
    progressing = next(one for one in out.conditions if one.type == "Progressing")
    assert (progressing.status, progressing.reason) == ("False", "Settled")
    assert progressing.message.endswith("limits.maxInstances 2 makes 1P3D 1P1D")


def test_counts_revisions_and_fingerprints() -> None:
    old = msgspec.structs.replace(pod(2, Role.DECODE), revision="r0")
    out = think(wish(1, 2, "r1", "r2"), seen(P, D, old, pod(3, Role.DECODE, Phase.LOST)), 0.0).status
    assert (out.revision, out.revisions, out.fingerprints) == ("r1/r2", ("r0", "r1"), ("f" * 32,))
    assert (out.roles.prefill.updated, out.roles.decode.updated, out.roles.decode.revision) == (1, 0, "r2")
    assert out.roles.decode.ready == 2


def test_a_thousand_instances_take_milliseconds() -> None:
    why = Waiting("Unschedulable", "0/9 nodes are available", place=True)
    many = [pod(n, Role.PREFILL if n < 250 else Role.DECODE, load=n % 7, roster=250 <= n < 258) for n in range(900)]
    late = [pod(n, Role.DECODE, Phase.STARTING, absent=why) for n in range(900, 1000)]
    observed, want = seen(*many, *late), wish(250, 750, "r2", rollout=Rollout(max_surge=100))
    think(want, observed, 0.0)
    took = []
    for _ in range(5):
        began = time.process_time()
        think(want, observed, 0.0)
        took.append(time.process_time() - began)
    print(f"a round over 1,000 instances: {min(took) * 1000:.1f} ms")
    assert min(took) < 0.2


def with_adapters(instance: Instance, order: str, waiting: int = 0, *problems: AdapterProblem) -> Instance:
    return msgspec.structs.replace(instance, adapters=AdapterReport(order, waiting, problems))


def test_adapters_are_loaded_once_all_that_serve_have_them() -> None:
    order = adapters.order_of((Adapter("sql", "/sql"), Adapter("law", "/law")))
    desired = msgspec.structs.replace(wish(1, 1), adapters=order)

    def says(*instances: Instance, **more: Any) -> tuple[str, str, str]:
        found = said(desired, seen(*instances, **more))["AdaptersLoaded"]
        return found.status, found.reason, found.message

    have = [with_adapters(each, order.digest) for each in (P, D)]
    assert says(*have) == ("True", "Loaded", "2 adapters on 2 instances")
    assert says(have[0], D)[:2] == ("False", "Loading"), "it was not told yet"
    assert says(have[0], with_adapters(D, "of before"))[:2] == ("False", "Loading")
    assert says(have[0], with_adapters(D, order.digest, 1))[:2] == ("False", "Loading")
    failed = [with_adapters(each, order.digest, 1, AdapterProblem("law", "there is no folder /law")) for each in (P, D)]
    assert says(*failed) == ("False", "NotLoaded", f"law on {P.name}, {D.name}: there is no folder /law")
    assert says()[:2] == ("Unknown", "NoInstance")
    assert "AdaptersLoaded" not in said(wish(1, 1), seen(*have)), "of a service that has none"


def test_disaggregating_says_what_a_router_judges() -> None:
    told = Disaggregation("True", "Receiving", "decode received 100% of the tokens over tcp at 1.2 GB/s", share=1.0)
    said_well = said(wish(1, 1), seen(P, D, disaggregation=told))["Disaggregating"]
    assert (said_well.status, said_well.reason, said_well.message) == ("True", "Receiving", told.message)
    failing = msgspec.structs.replace(told, holds="False", reason="LoadsFail", message="3 of 3 loads failed")
    found = said(wish(1, 1), seen(P, D, disaggregation=failing))
    assert (found["Disaggregating"].status, found["Disaggregating"].reason) == ("False", "LoadsFail")
    assert found["Ready"].status == "True", "answers are right without it"


def test_disaggregating_is_not_known_without_a_router_and_not_asked_for_without_prefill() -> None:
    unknown = said(wish(1, 1), seen(P, D))["Disaggregating"]
    assert (unknown.status, unknown.reason) == ("Unknown", "NoRouter")
    alone = said(wish(0, 1), seen(D, disaggregation=Disaggregation("False", "NoPrefill", "…")))["Disaggregating"]
    assert (alone.status, alone.reason) == ("False", "DecodeAlone")
