"""Agents of a scripted kubelet never share a loopback network."""

from __future__ import annotations

import os
import subprocess
import sys

import node_agent
import pytest
from node_agent import claim_network

CLAIM_ONE = "import sys, node_agent; node_agent.NETWORKS = [int(sys.argv[1])]; node_agent.claim_network()"


def test_no_two_agents_have_one_network_whatever_process_they_are_in(monkeypatch: pytest.MonkeyPatch) -> None:
    claim, network = claim_network()
    with claim:
        monkeypatch.setattr(node_agent, "NETWORKS", [network])
        with pytest.raises(OSError, match="taken by another agent"):
            claim_network()
        other = subprocess.run([sys.executable, "-c", CLAIM_ONE, str(network)], capture_output=True, text=True, timeout=60,
                               check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        assert "taken by another agent" in other.stderr
    again, same = claim_network()
    again.close()
    assert same == network
