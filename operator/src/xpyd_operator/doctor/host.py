"""What is wrong with a host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from xpyd_operator.doctor.finding import Ailment
from xpyd_operator.doctor.reading import HostReading

FILES: Final = 8192
"""A router takes two or three for each request, an engine five for each pair of ranks."""
MEMLOCK: Final = 1 << 30
"""What RDMA registers is locked: at least a buffer of KV."""
FREE: Final = 0.05
SHM: Final = 1 << 30
"""Free bytes of /dev/shm that the copies of one engine take at least."""
GB: Final = 1e9


def host_findings(host: HostReading) -> Iterator[Ailment]:
    """Of one host."""
    if host.files < FILES:
        yield Ailment("files", f"a process of this host may have {host.files} files open",
                      (f"limit of open files: {host.files}, of which {FILES} should be there",),
                      "raise it: `ulimit -Hn 65536`, LimitNOFILE= of a systemd unit, or the container runtime's default")
    if host.rdma and not host.nixl:
        yield Ailment("nixl-missing", "there is RDMA, and no NIXL to use it with",
                      (f"RDMA devices that are up: {', '.join(host.rdma[:4])}", "Python finds no package nixl"),
                      "install nixl into engine.image (docs/rdma.md), or use an image that has it")
    if host.rdma and 0 <= host.memlock < MEMLOCK:
        yield Ailment("memlock", f"a process here may lock {host.memlock / GB:.3g} GB of memory: too few for RDMA",
                      (f"RDMA devices that are up: {', '.join(host.rdma[:4])}",
                       f"limit of locked memory: {host.memlock} bytes, of which {MEMLOCK} should be there"),
                      "raise it: `ulimit -Hl unlimited`, LimitMEMLOCK=infinity of the container runtime's unit "
                      "(docs/rdma.md)")
    short = []
    if host.memory and host.memory_free < FREE * host.memory:
        short.append(f"{host.memory_free / GB:.1f} of {host.memory / GB:.1f} GB of memory are free")
    if host.shm and host.shm_free < min(SHM, host.shm // 2):
        short.append(f"{host.shm_free / GB:.2f} of {host.shm / GB:.2f} GB of /dev/shm are free")
    if short:
        yield Ailment("memory", "this host is nearly out of memory", tuple(short),
                      "end what takes it; of /dev/shm: remove what dead processes left, or lower kv.memory")


def clock_finding(host: HostReading, hosts: int) -> Ailment | None:
    """Clocks matter where a service spans hosts: times of traces and logs are put beside each other by them."""
    if not host.clock or hosts < 2:
        return None
    return Ailment("clocks", "the clock of this host is not kept right", (host.clock, f"the service spans {hosts} hosts"),
                   "run chrony or systemd-timesyncd; what is signed is refused where clocks differ by minutes")
