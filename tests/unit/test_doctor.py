"""Each planted fault is named first, links by their GB/s, and nothing is named where all is well."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from clinic import GPU, KV_BYTES, healthy, instance, intake, reading, sound, traffic

from xpyd_operator.doctor.examine import examine
from xpyd_operator.doctor.finding import HARM, any_broken
from xpyd_operator.doctor.reading import Examination, ServiceReading
from xpyd_sidecar.contract.fleet import FleetFailure, Quantiles, Rates
from xpyd_sidecar.contract.ids import Fingerprint, HostPort, Incarnation, InstanceName, Role, State
from xpyd_sidecar.contract.intake import Disaggregation, IntakeRates
from xpyd_sidecar.contract.membership import Load
from xpyd_sidecar.contract.pair_notes import RefusedPeer
from xpyd_sidecar.contract.sample import Sample

P = instance("p0", Role.PREFILL, intake=IntakeRates(computed_s=4000.0))
D = instance("d0", Role.DECODE, intake=intake(4000.0))
REFUSES = (RefusedPeer(InstanceName("p0"), Incarnation("i-p0"), "tensor 3 on 8 heads"),)
HANDOVER_LATE = {"ttft": Quantiles(120, 2.5, 4, 5), "handover": Quantiles(120, 2.0, 3.0, 4.0)}


def fails(reason: str, message: str, **more: object) -> Disaggregation:
    return msgspec.structs.replace(Disaggregation("False", reason, message), **more)


def of(*instances: object, **more: object) -> Examination:
    return reading(healthy(instances=instances, **more))


def waits_for_prefill() -> Examination:
    """Prefill is asked for nearly all that it can."""
    return reading(healthy(traffic(4000, 4.8)))


FAULTS: dict[str, Callable[[], Examination]] = {
    "no-decode": lambda: of(P, instance("d0", Role.DECODE, state=State.STARTING)),
    "fingerprints": lambda: of(P, instance("d0", Role.DECODE, fingerprint=Fingerprint("e" * 32))),
    "pairs-refused": lambda: of(P, instance("d0", Role.DECODE, refused=REFUSES)),
    "no-prefill": lambda: of(instance("p0", Role.PREFILL, suspended="GET /health: refused"), D,
                             disaggregation=fails("NoPrefill", "decode computes all prompts")),
    "instances-fail": lambda: of(P, D, instance("d1", Role.DECODE, ejected="5 of its last 6 requests failed")),
    "requests-fail": lambda: of(P, D, rates=Rates(requests=2.0, failed=0.5), failures=(
        FleetFailure(1.0, "failed", 502, "d0: broke off", "r"),)),
    "loads-fail": lambda: of(P, D, disaggregation=fails("LoadsFail", "9 of 10 loads failed", failed=(("checksum", 9),))),
    "not-received": lambda: of(P, D, disaggregation=fails("Computed", "decode received none", computed_s=4000.0)),
    "link": lambda: of(P, instance("d0", Role.DECODE, intake=intake(8000.0, best=8000.0 * KV_BYTES)),
                       latencies=HANDOVER_LATE),
    "decode-short": lambda: of(P, instance("d0", Role.DECODE, load=Load(running=64, waiting=32, kv_usage=0.97),
                                           intake=intake(4000.0)), latencies=HANDOVER_LATE),
    "prefill-short": waits_for_prefill,
    "no-payoff": lambda: reading(healthy(traffic(256, 6.0))),
    "prefill-idle": lambda: of(P, D, disaggregation=fails("SkippedByRule", "100% skip prefill by rule")),
    "cache-elsewhere": lambda: of(P, instance("d0", Role.DECODE, intake=intake(2000.0, cached_s=2000.0))),
    "worse-link": lambda: of(P, instance("d0", Role.DECODE, intake=intake(4000.0),
                                         links=("blocks come over tcp: nixl: no module named nixl",))),
    "memlock": lambda: reading(host=sound(memlock=64 << 10)),
    "nixl-missing": lambda: reading(host=sound(nixl=False)),
    "files": lambda: reading(host=sound(files=1024)),
    "memory": lambda: reading(host=sound(shm_free=1 << 20)),
    "clocks": lambda: reading(
        healthy(instances=(P, instance("d0", Role.DECODE, http=(HostPort("10.0.0.2:8000"),), intake=intake(4000.0)))),
        sound(clock="the kernel says that nobody keeps its clock right")),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named_first_with_evidence_and_what_to_do(name: str) -> None:
    diagnosis = examine(FAULTS[name]())
    assert [one.name for one in diagnosis.findings][:1] == [name]
    first = diagnosis.findings[0]
    assert first.evidence
    assert first.do
    assert any_broken(diagnosis.findings) == (HARM[name] == "broken")


def test_nothing_is_named_where_all_is_well() -> None:
    diagnosis = examine(reading())
    assert diagnosis.findings == ()
    assert diagnosis.compared is not None


def test_all_that_can_be_found_has_its_planted_fault() -> None:
    assert set(HARM) - set(FAULTS) == {"plain-engines", "skip-short"}, "which have tests of their own"


def test_of_several_faults_the_most_harmful_comes_first() -> None:
    both = Examination(sound(files=1024, shm_free=0), FAULTS["loads-fail"]().service)
    assert [one.name for one in examine(both).findings] == ["loads-fail", "files", "memory"]


@pytest.mark.parametrize(("gigabits", "had"), [(10, "1.25"), (25, "3.12"), (100, "12.5")])
def test_a_link_that_is_the_limit_is_named_with_what_it_has_and_what_is_needed(gigabits: int, had: str) -> None:
    link = gigabits / 8 * 1e9
    tokens = 1.6 * link / KV_BYTES
    engine = msgspec.structs.replace(GPU, prefill_per_token=1 / 200_000, handover=2.0)
    sample = traffic(4000, tokens / 4000, engine=engine, seconds=60)
    full = instance("d0", Role.DECODE, intake=intake(link / KV_BYTES * 0.97, best=link))
    [first, *_] = examine(reading(healthy(sample, instances=(P, full), latencies=HANDOVER_LATE))).findings
    assert first.name == "link"
    needed = sum(one.prompt for one in sample.requests) / 60 * KV_BYTES / 1e9
    assert f"{had} GB/s are had" in first.what
    assert f"{needed:.3g} GB/s are needed" in first.what
    assert f"({gigabits} Gb/s)" in first.evidence[0] or f"({float(gigabits):.3g} Gb/s)" in first.evidence[0]


def test_a_link_that_is_used_up_by_nobody_is_not_named() -> None:
    busy = instance("d0", Role.DECODE, intake=intake(8000.0, best=8000.0 * KV_BYTES))
    assert examine(of(P, busy)).findings == (), "it has carried no more yet, and KV is not late"
    full = instance("d0", Role.DECODE, load=Load(running=9, waiting=9, kv_usage=0.95),
                    intake=intake(8000.0, best=8000.0 * KV_BYTES))
    assert examine(of(P, full, latencies=HANDOVER_LATE)).findings[0].name == "decode-short", "KV waits for room"


def test_chat_of_256_tokens_is_told_to_skip_or_end() -> None:
    [first, *_] = examine(reading(healthy(traffic(256, 6.0)))).findings
    assert first.name == "no-payoff"
    assert "skipPrefill.belowTokens" in first.do
    assert "prefill.replicas: 0" in first.do


def test_prompts_of_13000_tokens_are_told_to_keep_it() -> None:
    diagnosis = examine(reading(healthy(traffic(13_000, 0.8, output=300))))
    assert diagnosis.findings == ()
    assert diagnosis.compared is not None
    assert diagnosis.compared.verdict == "keep"


def test_a_mix_is_told_which_prompts_to_skip() -> None:
    short, long = traffic(100, 2.0), traffic(6000, 1.0, seed=2)
    both = sorted((*short.requests, *long.requests), key=lambda one: one.at)
    found = examine(reading(healthy(Sample(short.service, 600.0, tuple(both))))).findings
    assert [one.name for one in found] == ["skip-short"]
    below = int(found[0].do.rsplit(" ", 1)[1])
    assert 100 < below < 1000


def test_a_host_alone_is_examined_too() -> None:
    diagnosis = examine(Examination(host=sound(files=256)))
    assert [one.name for one in diagnosis.findings] == ["files"]
    assert (diagnosis.service, diagnosis.compared) == ("", None)


def test_a_router_that_keeps_no_sample_is_examined_without_it() -> None:
    whole = healthy()
    diagnosis = examine(reading(ServiceReading(whole.fleet, None)))
    assert diagnosis.findings == ()
    assert diagnosis.compared is None


def test_what_is_not_asked_for_is_no_fault() -> None:
    alone = healthy(instances=(D,), disaggregation=fails("NoPrefill", "…"))
    assert examine(reading(msgspec.structs.replace(alone, prefill_wanted=False))).findings == ()


def test_where_plain_engines_would_do_worse_short_prompts_are_no_reason_to_end_it() -> None:
    """Short prompts of a slow engine: each is a long stall for those that decode."""
    slow = msgspec.structs.replace(GPU, prefill_per_token=1 / 4000, prefill_start=0.0, handover=0.12)
    diagnosis = examine(reading(healthy(traffic(400, 4.0, engine=slow, output=100))))
    assert diagnosis.compared is not None
    assert diagnosis.compared.verdict == "keep"
    assert "no-payoff" not in [one.name for one in diagnosis.findings]


def test_prefill_that_is_slow_now_and_then_is_not_short() -> None:
    """On a machine that others use, prompts that come one by one take ten times as long now and then."""
    sample = traffic(4000, 0.3)
    slow = tuple(msgspec.structs.replace(one, prefill=one.prefill + 1.5, ttft=one.ttft + 1.5, total=one.total + 1.5)
                 if number % 3 else one for number, one in enumerate(sample.requests))
    found = examine(reading(healthy(Sample(sample.service, 600.0, slow)))).findings
    assert "prefill-short" not in [one.name for one in found]
