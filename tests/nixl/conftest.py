"""What these tests need besides the environment of the others: NIXL, in a folder of its own (``scripts/tiers.py nixl``).

    site    its site-packages, from XPYD_NIXL_SITE; the tests fail where it is not set
    tls     what UCX takes between the two processes: TCP, shared memory, or reads of the kernel's
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fair_session import fair  # noqa: F401 (a fixture)

ENV = "XPYD_NIXL_SITE"


@pytest.fixture(scope="session")
def site() -> str:
    folder = os.environ.get(ENV, "")
    assert (Path(folder) / "nixl").is_dir(), f"{ENV} must name the site-packages that NIXL is installed in"
    if folder not in sys.path:
        sys.path.append(folder)
    return folder


@pytest.fixture(params=["tcp", "posix,sysv,tcp", "shm,cma,tcp"], ids=["tcp", "shm", "cma"])
def tls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", request.param)
    return str(request.param)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UCX_TLS", "tcp")
    return "tcp"
