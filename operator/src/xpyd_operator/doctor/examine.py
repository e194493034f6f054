"""From one reading to all that was found. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from xpyd_operator.doctor.finding import Ailment, order_by_harm
from xpyd_operator.doctor.host import clock_finding, host_findings
from xpyd_operator.doctor.learned import learn
from xpyd_operator.doctor.links import link_findings, link_use
from xpyd_operator.doctor.reading import Examination, ServiceReading
from xpyd_operator.doctor.service import service_findings
from xpyd_operator.doctor.worth import Comparison, compare, worth_findings
from xpyd_sidecar.contract.ids import Role, split_host_port
from xpyd_sidecar.contract.intake import Disaggregation


class Diagnosis(msgspec.Struct, frozen=True):
    """What is told."""

    service: str = ""
    """Empty: only a host was looked at."""
    disaggregation: Disaggregation | None = None
    findings: tuple[Ailment, ...] = ()
    compared: Comparison | None = None
    """With plain engines; None: too little traffic, or nobody of a role serves."""


def examine(reading: Examination) -> Diagnosis:
    """All that follows from a reading, the most harmful first."""
    service = reading.service
    if service is None:
        return Diagnosis(findings=order_by_harm(host_findings(reading.host) if reading.host is not None else ()))
    learned = learn(service.sample, len(service.serving(Role.DECODE)))
    compared = compare(service, learned)
    use = link_use(service, learned)

    def found() -> Iterator[Ailment | None]:
        if reading.host is not None:
            yield from host_findings(reading.host)
            yield clock_finding(reading.host, _hosts(service))
        yield from service_findings(service)
        yield from link_findings(service, use)
        yield from worth_findings(service, learned, use, compared)

    return Diagnosis(service.fleet.service, service.fleet.disaggregation, order_by_harm(found()), compared)


def _hosts(service: ServiceReading) -> int:
    """Hosts that the engines' addresses name."""
    return len({split_host_port(address)[0] for one in service.fleet.instances for address in one.http})
