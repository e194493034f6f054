"""220 documents for judges, always the same: examples and a plain one with two changes, refused, warned of or right."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from api_documents import BASE

EXAMPLES = Path(__file__).parents[2] / "examples"
HOW_MANY = 220

EVERYWHERE: dict[str, dict[str, Any]] = {
    "pods": {"prefill": {"parallelism": {"tensor": 2, "pods": 3}}},
    "gone": {"router": {"compat": "none", "workers": 2}},
    "words that are gone": {"planner": {"mode": "Off"}, "router": {"placement": "Sidecar"}},
    "owned": {"engine": {"args": ["--port", "1", "--tensor-parallel-size=2"]}},
    "owned variables": {"engine": {"env": [{"name": "VLLM_API_KEY", "value": "x"}, {"name": "XPYD_A", "value": "y"}]}},
    "no decode": {"decode": {"replicas": 0}},
    "store": {"kv": {"offload": {"store": {"connector": "NixlConnector"}}}},
    "offloading": {"engine": {"args": ["--kv-offloading-size=64"]}},
    "policy": {"router": {"policy": "round_robbin", "failover": "never"}},
    "time": {"router": {"requestTimeout": "1 h"}},
    "stuck": {"rollout": {"maxSurge": 0, "maxUnavailable": 0}},
    "typo": {"decode": {"replica": 3}},
    "type": {"prefill": {"replicas": "one"}},
    "counts": {"decode": {"parallelism": {"tensor": 4}, "resources": {"limits": {"amd.com/gpu": 2}}}},
    "misnamed": {"template": {"spec": {"nodeselector": {"a": "b"}, "priority": "1"}}},
    "main": {"decode": {"template": {"spec": {"containers": [{"name": "main", "image": "x", "args": ["a"]}]}}}},
}
"""Refused for every target, with the same words."""
KUBE: dict[str, dict[str, Any]] = {
    "memory": {"decode": {"resources": {"limits": {"memory": "319Mi"}}}},
    "no GPUs to offload": {"kv": {"offload": {"memory": "64Gi"}}, "decode": {"parallelism": {"device": "none"}}},
    "memory to offload": {"kv": {"offload": {"memory": "64Gi"}}, "prefill": {"resources": {"limits": {"memory": "64Gi"}}}},
    "shared memory": {"kv": {"transport": "shm"}, "decode": {"parallelism": {"tensor": 2, "pods": 2}}},
    "stages": {"decode": {"parallelism": {"pipeline": 2, "device": "none"}, "args": ["--enforce-eager"]}},
    "host network": {"prefill": {"template": {"spec": {"hostNetwork": True, "restartPolicy": "Never"}}}},
    "name": {"prefill": {"template": {"metadata": {"name": "x", "labels": {"xpyd.dev/role": "decode"}}}}},
    "lists": {"decode": {"template": {"spec": {"containers": {"name": "main"}, "volumes": [{"emptyDir": {}}]}}}},
    "engine's port": {"router": {"ports": {"http": 8000}, "placement": "sidecar"}},
    "beside": {"model": {"source": "./weights"}},
}
LOCAL: dict[str, dict[str, Any]] = {
    "claim": {"model": {"source": "pvc://weights/a"}},
    "cache": {"model": {"source": "a/b", "cache": {"claim": "c"}}},
    "token": {"model": {"source": "a/b", "tokenSecret": {"name": "s", "key": "k"}}},
    "disk": {"kv": {"offload": {"disk": "500Gi"}}},
    "keys": {"router": {"apiKeySecret": {"name": "s", "key": "k"}}},
    "certificate": {"router": {"tls": {"secret": "c"}}},
    "reference": {"engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}},
}
WARNED: dict[str, dict[str, Any]] = {
    "tokens only": {"engine": {"args": ["--tokens-only"]}},
    "shortened": {"decode": {"args": ["--tokens_on"]}},
    "pooling": {"engine": {"args": ["--runner", "pooling"]}},
    "convert": {"prefill": {"args": ["--convert=embed"]}},
    "drafts": {"decode": {"args": ["--speculative-config.method=eagle", "--spec-model", "a/b"]}},
    "drafts of another model": {"engine": {"args": ["-sc", '{"method": "mtp", "num_speculative_tokens": 1}']},
                                "prefill": {"args": ["--spec-method=dflash", "-sc=x"]}},
    "experts": {"decode": {"args": ["--enforce-eager", "--enable-return-routed-experts"]}},
    "no option": {"engine": {"args": ["--no-such", "--gpu-memory-utilization=9", "--quantization", "fp9"]}},
    "second model": {"engine": {"args": ["Qwen/Qwen3-8B"]}},
    "block size": {"prefill": {"args": ["--block-size", "32"]}, "decode": {"args": ["--block-size=64"]}},
    "dtype": {"prefill": {"args": ["--dtype", "half"]}, "decode": {"args": ["--dtype", "bfloat16"]}},
    "kv dtype": {"prefill": {"args": ["--kv-cache-dtype=fp8"]}, "decode": {"args": ["--kv-cache-dtype=float16"]}},
    "tools": {"engine": {"args": ["--enable-auto-tool-choice"]}},
    "no prefix cache": {"kv": {"offload": {"memory": "1Gi"}}, "decode": {"args": ["--no-enable-prefix-caching"]}},
    "allocator": {"engine": {"env": [{"name": "PYTORCH_CUDA_ALLOC_CONF", "value": "expandable_segments:True"}]}},
}
GOOD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "more decode": {"decode": {"replicas": 7}},
    "eager": {"engine": {"args": ["--enforce-eager", "--max-model-len", "4096"]}},
    "same dtype": {"prefill": {"args": ["--dtype", "half"]}, "decode": {"args": ["--dtype=float16"]}},
    "drain": {"drain": {"timeout": "90s"}},
    "drafts on both": {"engine": {"args": ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}']}},
    "waits": {"router": {"maxInFlight": 9}},
    "offload": {"kv": {"offload": {"memory": "64Gi", "store": {"connector": "LMCacheMPConnector"}}, "audit": 0.01}},
}
CHANGES = EVERYWHERE | KUBE | LOCAL | WARNED | GOOD


class Made(NamedTuple):
    """One document."""

    name: str
    changes: tuple[str, str]
    value: dict[str, Any]

    @property
    def alike(self) -> bool:
        """Whether every target has the same to say of it; examples are for one."""
        return self.name.startswith("plain") and not any(change in KUBE or change in LOCAL for change in self.changes)


def documents() -> list[Made]:
    """All of them: every pair of changes in turn, over one example after the other."""
    return list(itertools.islice(_made(), HOW_MANY))


def _made() -> Iterator[Made]:
    bases = []
    for path in sorted(EXAMPLES.glob("*/*.yaml")):
        found = [one for one in yaml.safe_load_all(path.read_text()) if one and one.get("kind") == "DisaggService"]
        bases += [(f"{path.parent.name}-{path.stem}", found[0]), ("plain", BASE)]
    pairs = sorted(itertools.combinations(CHANGES, 2), key=lambda pair: hash_of(" ".join(pair)))
    for number, ((name, base), pair) in enumerate(zip(itertools.cycle(bases), pairs, strict=False)):
        value = {key: copy.deepcopy(base[key]) for key in ("apiVersion", "kind", "metadata", "spec")}
        for change in pair:
            merged(value["spec"], CHANGES[change])
        yield Made(f"{name}-{number}-{'+'.join(pair)}", pair, value)


def hash_of(text: str) -> int:
    """Mixes the pairs, the same way each time."""
    return int.from_bytes(text.encode()) % 1_000_003


def merged(into: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """One change made to a section; lists of arguments and variables are added to."""
    for key, value in more.items():
        there = into.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            merged(there, value)
        elif isinstance(there, list) and isinstance(value, list):
            into[key] = there + copy.deepcopy(value)
        else:
            into[key] = copy.deepcopy(value)
    return into
