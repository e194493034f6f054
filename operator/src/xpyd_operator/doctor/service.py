"""What does not work of a service: nobody serves, no pair can be made, loads fail, prompts are computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from xpyd_operator.doctor.finding import Ailment
from xpyd_operator.doctor.reading import ServiceReading
from xpyd_sidecar.contract.fleet import FleetInstance, words_of_ejection
from xpyd_sidecar.contract.ids import Role

FAILED: Final = 0.01
"""Share of requests that may fail."""
ENOUGH: Final = 20
"""Requests of the last minute without which shares say nothing."""
_NAMED: Final = 3
WHY: Final = {
    "checksum": "bytes change on their way: memory or network cards of the hosts; the audit says whether answers differ",
    "peer_lost": "connections between the engines break: the network, a NetworkPolicy, or a prefill that ends",
    "deadline": "KV comes too late: a link or a prefill that cannot keep up (see the other findings)",
    "overflow": "no room for KV: raise kv.memory, or add decode instances",
    "incompatible": "the two roles are not of one version or layout: end the rollout",
    "identity": "the two legs are not the same prompt: the image of one role has another tokenizer or template",
    "auth": "the two roles have different keys: restart the older pods",
    "incarnation": "a prefill was restarted while its KV was awaited: look why it ends",
    "protocol": "the two roles do not speak the same version of the KV plane: end the rollout",
}
"""What a failed load points at, by its outcome."""


def service_findings(service: ServiceReading) -> Iterator[Ailment]:
    """Of one service."""
    decodes, prefills = service.serving(Role.DECODE), service.serving(Role.PREFILL)
    if not decodes:
        yield Ailment("no-decode", "no decode instance serves: every request is refused", _states(service, Role.DECODE),
                      "look at the pods or logs of decode: `kubectl describe dsvc`, `xpyd status`")
    elif service.prefill_wanted and not prefills:
        yield Ailment("no-prefill", "no prefill instance serves: decode computes all prompts",
                      _states(service, Role.PREFILL),
                      "look at the pods or logs of prefill: `kubectl describe dsvc`, `xpyd status` (nothing, where the "
                      "document asks for none)")
    elif service.prefill_wanted:
        yield from _pairs(prefills, decodes)
    yield from _failing(service)
    yield from _requests(service)
    if decodes and prefills:
        yield from _received(service)


def _states(service: ServiceReading, role: Role) -> tuple[str, ...]:
    there = service.instances_of(role)
    if not there:
        return (f"the router {service.fleet.router} knows no {role} instance",)
    return tuple(f"{one.instance}: {_why(one) or one.state}" for one in there[:_NAMED])


def _why(one: FleetInstance) -> str:
    return one.suspended or words_of_ejection(one)


def _pairs(prefills: Sequence[FleetInstance], decodes: Sequence[FleetInstance]) -> Iterator[Ailment]:
    ours, theirs = {one.fingerprint for one in prefills}, {one.fingerprint for one in decodes}
    if not ours & theirs:
        yield Ailment("fingerprints", "prefill and decode compute different KV, so that no pair is made",
                      (f"prefill: {', '.join(sorted(ours)[:_NAMED])}", f"decode: {', '.join(sorted(theirs)[:_NAMED])}"),
                      "give both roles one image, types, block size and attention backend")
        return
    lives = {(one.instance, one.incarnation) for one in prefills}
    refused = [(decode.instance, peer.instance, peer.reason) for decode in decodes for peer in decode.refused
               if (peer.instance, peer.incarnation) in lives]
    possible = sum(prefill.fingerprint == decode.fingerprint for prefill in prefills for decode in decodes)
    if refused and len(refused) >= possible:
        yield Ailment("pairs-refused", "decode has found that it can take KV from no prefill",
                      tuple(f"{decode} from {prefill}: {why}" for decode, prefill, why in refused[:_NAMED]),
                      "mend what is named; pairs are tried again by themselves (docs/operations.md)")


def _failing(service: ServiceReading) -> Iterator[Ailment]:
    """Instances that live and are not picked, or do not step."""
    found = [f"{one.instance} ({one.role}): {_why(one)}" for one in service.fleet.instances if _why(one)]
    found += [f"{one.instance} ({one.role}): its core has not stepped for {one.stalled_s:.0f} s, with requests"
              for one in service.fleet.instances if one.stalled_s and not _why(one)]
    if found:
        yield Ailment("instances-fail", f"{len(found)} of {len(service.fleet.instances)} get no requests, or hang",
                      tuple(found[:_NAMED]), "its log says why; a pod that lives and does not answer is deleted by hand")


def _requests(service: ServiceReading) -> Iterator[Ailment]:
    rates, over_s = service.fleet.rates, service.fleet.window_s
    requests, failed = rates.requests * over_s, rates.failed * over_s
    if requests >= ENOUGH and failed > FAILED * requests:
        why = Counter(f"{one.outcome}: {one.detail}" for one in service.fleet.failures)
        yield Ailment("requests-fail", f"{failed / requests:.0%} of the last minute's requests failed",
                      (f"{failed:.0f} of {requests:.0f} in {over_s} s", *(word for word, _ in why.most_common(_NAMED))),
                      "the log of the router has a line with the reason for each")


def _received(service: ServiceReading) -> Iterator[Ailment]:
    told = service.fleet.disaggregation
    if told.holds != "False":
        return
    if told.reason == "LoadsFail":
        worst = told.failed[0][0] if told.failed else ""
        yield Ailment("loads-fail", "loads of KV fail, so that decode computes prompts that prefill has computed",
                      (told.message, *(f"{word}: {count}" for word, count in told.failed[:_NAMED])),
                      WHY.get(worst, "the log of decode has the reason of each load that failed"))
    elif told.reason == "Computed":
        yield Ailment("not-received", "decode computes prompts, though prefill serves and no load fails",
                      (told.message, f"{told.computed_s:g} tokens/s computed, {told.received_s:g} received"),
                      "the log of the routers: prefill legs that fail, or requests that come past these routers")
    elif told.reason == "SkippedByRule":
        yield Ailment("prefill-idle", "nearly all prompts skip prefill, as the document asks for", (told.message,),
                      "lower router.skipPrefill, or use the GPUs of prefill for decode")
