"""Documents for tests of the API: one that is right, and many that are not."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

BASE: dict[str, Any] = {
    "apiVersion": "xpyd.dev/v1beta1",
    "kind": "DisaggService",
    "metadata": {"name": "qwen"},
    "spec": {"model": {"source": "Qwen/Qwen3-8B"}, "prefill": {"replicas": 1}, "decode": {"replicas": 3}},
}


def document(changes: dict[str, Any] | None = None, /, **spec: Any) -> dict[str, Any]:
    """The right document with changes: by dotted path from the root (``None`` removes), or sections of the spec."""
    made = copy.deepcopy(BASE)
    made["spec"] |= spec
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        section = made
        for name in parents:
            section = section.setdefault(name, {})
        if value is None:
            del section[last]
        else:
            section[last] = value
    return made


class Bad(NamedTuple):
    """A document that is wrong in one way."""

    obj: Any
    path: str
    """Path of the fault."""
    tells: str
    """Part of the message that says what is wrong or what would be right."""
    server: bool = True
    """Whether the API server refuses it too."""


def bad(path: str, tells: str, changes: dict[str, Any] | None = None, *, server: bool = True, **spec: Any) -> Bad:
    return Bad(document(changes, **spec), path, tells, server)


def args(*items: Any) -> dict[str, Any]:
    return {"spec.engine.args": list(items)}


_BOTH = {"replicas": 1, "scaling": {"min": 1, "max": 2}}
_OPTION = "is set by xpyd"
GATEWAY = {"parentRefs": [{"name": "public", "namespace": "gateways"}]}

SQL = {"name": "sql", "source": "/adapters/sql"}
MALFORMED: dict[str, Bad] = {
    # LoRA adapters
    "an adapter twice": bad("spec.adapters[1].name", "each may stand once", {"spec.adapters": [SQL, SQL]}),
    "an adapter as the model": bad("spec.adapters[0].name", "write another one", {
        "spec.adapters": [{**SQL, "name": "tiny"}], "spec.model.servedName": "tiny"}),
    "names of adapters too long": bad("spec.adapters", "at most 32768", {
        "spec.adapters": [{**SQL, "name": f"{number}{'x' * 120}"} for number in range(300)]}, server=False),
    "an adapter of several pods": bad("spec.adapters", "--lora-modules", {
        "spec.adapters": [SQL], "spec.decode.parallelism": {"tensor": 2, "pods": 2}}),
    "a folder with a revision": bad("spec.adapters[0].revision", "only for a hub id", {
        "spec.adapters": [{**SQL, "revision": "v1"}]}),
    # The document itself
    "a list": Bad([1, 2], "document", "must be a section"),
    "text": Bad("DisaggService", "document", "must be a section"),
    "nothing": Bad({}, "spec", "required"),
    "wrong kind": bad("kind", "must be DisaggService", {"kind": "DisagService"}),
    "kind of another version": bad("apiVersion", "must be xpyd.dev/v1beta1", {"apiVersion": "xpyd.dev/v1"}),
    "no apiVersion": bad("apiVersion", "required (xpyd.dev/v1beta1)", {"apiVersion": None}),
    "no metadata": bad("metadata", "required (with name)", {"metadata": None}),
    "no name": bad("metadata.name", "required", {"metadata": {}}),
    "name too long": bad("metadata.name", "46 characters long, at most 45", {"metadata.name": "a" * 46}),
    "name with capitals": bad("metadata.name", "lower-case letters", {"metadata.name": "Qwen"}),
    "name begins with a digit": bad("metadata.name", "beginning with a letter", {"metadata.name": "3b"}),
    "name ends with a newline": bad("metadata.name", "lower-case letters", {"metadata.name": "qwen\n"}),
    "unknown field at the root": bad("specs", "did you mean spec?", {"specs": {}}),
    "no spec": bad("spec", "required (with model)", {"spec": None}),
    # Structure
    "no model": bad("spec.model", "required (with source)", {"spec.model": None}),
    "no source": bad("spec.model.source", "a hub id", {"spec.model": {"servedName": "x"}}),
    "misspelled section": bad("spec.modle", "did you mean model?", {"spec.modle": {}}),
    "misspelled field": bad("spec.decode.replica", "did you mean replicas?", {"spec.decode": {"replica": 2}}),
    "snake case": bad("spec.rollout.max_surge", "did you mean maxSurge?", rollout={"max_surge": 2}),
    "unlike any field": bad("spec.kv.xyzzy", "known here: transport", kv={"xyzzy": 1}),
    "number as text": bad("spec.decode.replicas", "write it without quotes", {"spec.decode.replicas": "3"}),
    "count as a word": bad("spec.decode.replicas", "must be a whole number", {"spec.decode.replicas": "three"}),
    "count with a fraction": bad("spec.decode.replicas", "must be a whole number", {"spec.decode.replicas": 1.5}),
    "count that is true": bad("spec.decode.replicas", "not true", {"spec.decode.replicas": True}),
    "negative count": bad("spec.prefill.replicas", "must be from 0 to 1000, not -1", {"spec.prefill.replicas": -1}),
    "far too many": bad("spec.decode.replicas", "from 0 to 1000", {"spec.decode.replicas": 100000}),
    "number beyond 64 bits": bad("spec.kv.memory", "64 bits", kv={"memory": 1 << 70}),
    "section that is a list": bad("spec.router", "must be a section", router=["round_robin"]),
    "section that is a number": bad("spec.decode", "must be a section with fields (replicas", decode=3),
    "list that is text": bad("spec.engine.args", "must be a list", {"spec.engine.args": "--enforce-eager"}),
    "number among arguments": bad('spec.engine.args[1]', 'put it in quotes: "1024"', args("--max-model-len", 1024)),
    "empty argument": bad("spec.prefill.args[0]", "must not be empty", {"spec.prefill.args": [""]}),
    "too many arguments": bad("spec.engine.args", "at most 64", args(*["--x"] * 65)),
    "argument too long": bad("spec.engine.args[0]", "at most 2048", args("--" + "x" * 2048)),
    "unquoted off": bad("spec.planner.mode", "is read as false by YAML; write disabled", planner={"mode": False}),
    "unquoted on of encryption": bad("spec.kv.encryption", "one of disabled, enabled, network", kv={"encryption": True}),
    "unquoted off of encryption": bad("spec.kv.encryption", "write disabled", kv={"encryption": False}),
    "encryption by rdma": bad(
        "spec.kv.encryption", "rdma does not encrypt", kv={"transport": "rdma", "encryption": "enabled"}),
    "encryption by nccl": bad(
        "spec.kv.encryption", "nccl does not encrypt", kv={"transport": "nccl", "encryption": "enabled"}),
    "a word in a third spelling": bad("spec.router.placement", "did you mean sidecar?", router={"placement": "SIDECAR"}),
    "a word of before, misspelled": bad("spec.planner.mode", "did you mean auto?", planner={"mode": "Autos"}),
    "on": bad("spec.planner.mode", "must be one of auto, disabled, observe", planner={"mode": True}),
    "a word of before of another field": bad("spec.kv.encryption", "must be one of", kv={"encryption": "Off"}),
    "unknown policy": bad("spec.router.policy", "did you mean least_loaded?", router={"policy": "least-load"}),
    "wrong case": bad("spec.router.policy", "did you mean round_robin?", router={"policy": "Round_Robin"}),
    "unknown transport": bad("spec.kv.transport", "auto, nccl, rdma, shm, tcp", kv={"transport": "ucx"}),
    "enabled as text": bad("spec.networkPolicy.enabled", "must be true or false", networkPolicy={"enabled": "yes"}),
    "source of no form": bad("spec.model.source", "pvc://claim/path", {"spec.model.source": "a b"}),
    "source with a scheme": bad("spec.model.source", "a hub id", {"spec.model.source": "https://example.org/m"}),
    "source too long": bad("spec.model.source", "at most 512", {"spec.model.source": "/" + "x" * 512}),
    "template that is text": bad("spec.decode.template", "must be an object", {"spec.decode.template": "x"}),
    # Kinds of text
    "duration without a unit": bad("spec.drain.timeout", "e.g. 30s", drain={"timeout": "30"}),
    "duration that is a number": bad("spec.drain.timeout", "a unit", drain={"timeout": 30}),
    "duration in words": bad("spec.drain.timeout", "a unit", drain={"timeout": "ten minutes"}),
    "negative duration": bad("spec.drain.timeout", "a unit", drain={"timeout": "-5s"}),
    "duration of nothing": bad("spec.drain.timeout", "from 1s to 168h", drain={"timeout": "0s"}),
    "duration too long": bad("spec.engine.startupTimeout", "from 1s to 168h", {"spec.engine.startupTimeout": "200h"}),
    "no time to wait": bad("spec.router.hold", "from 10ms", router={"hold": "1ms"}),
    "size with an unknown unit": bad("spec.kv.memory", "e.g. 2Gi", kv={"memory": "2GB"}),
    "size with a fraction": bad("spec.kv.memory", "e.g. 2Gi", kv={"memory": 1.5}),
    "negative size": bad("spec.kv.memory", "at least 1", kv={"memory": -1}),
    "quantity of no form": bad(
        "spec.decode.resources.limits.memory", "16Gi", {"spec.decode.resources": {"limits": {"memory": "16 Gi"}}},
        server=False,
    ),
    "quantity with a fraction": bad(
        "spec.decode.resources.limits.cpu", "500m", {"spec.decode.resources": {"limits": {"cpu": 0.5}}},
        server=False,
    ),
    "privileged port": bad("spec.router.ports.http", "from 1024 to 65535, not 80", router={"ports": {"http": 80}}),
    "port out of range": bad("spec.router.ports.http", "not 70000", router={"ports": {"http": 70000}}),
    "host path that is relative": bad(
        "spec.kv.sharedMemory.hostPath", "absolute path", kv={"sharedMemory": {"hostPath": "shm"}}
    ),
    "secret without a key": bad("spec.router.apiKeySecret.key", "required", router={"apiKeySecret": {"name": "keys"}}),
    "secret name with capitals": bad(
        "spec.model.tokenSecret.name", "lower-case", {"spec.model.tokenSecret": {"name": "Hub", "key": "token"}},
        server=False,
    ),
    # Environment
    "value that is a number": bad(
        "spec.engine.env[0].value", "quotes", {"spec.engine.env": [{"name": "A", "value": 1}]},
        server=False,
    ),
    "variable twice": bad(
        "spec.engine.env[1].name", "also item 0", {"spec.engine.env": [{"name": "A"}, {"name": "A"}]},
        server=False,
    ),
    "variable that xpyd sets": bad(
        "spec.engine.env[0].name", _OPTION, {"spec.engine.env": [{"name": "PYTHONPATH", "value": "/x"}]},
        server=False,
    ),
    "variable with two values": bad(
        "spec.engine.env[0]", "exclude each", {"spec.engine.env": [{"name": "A", "value": "b", "valueFrom": {"x": 1}}]},
        server=False,
    ),
    # Owned arguments, in each spelling
    "owned, value apart": bad("spec.engine.args[0]", _OPTION, args("--port", "8000")),
    "owned, with =": bad("spec.engine.args[0]", _OPTION, args("--tensor-parallel-size=2")),
    "owned, with _": bad("spec.engine.args[0]", "(--kv-transfer-config)", args("--kv_transfer_config", "{}")),
    "owned, dotted": bad("spec.engine.args[0]", "write spec.kv", args("--kv-transfer-config.kv_role=kv_both")),
    "owned, shortened": bad("spec.engine.args[0]", "(--tensor-parallel-size)", args("--tensor-par", "2")),
    "owned, alias": bad("spec.engine.args[0]", "(--tensor-parallel-size)", args("-tp", "2")),
    "owned, alias with =": bad("spec.engine.args[0]", "(--pipeline-parallel-size)", args("-pp=2")),
    "owned, value attached": bad("spec.engine.args[0]", "(--nnodes)", args("-n2")),
    "owned, of a family": bad("spec.engine.args[0]", _OPTION, args("--data-parallel-rank", "0")),
    "owned, model": bad("spec.engine.args[0]", "write spec.model.source", args("--model", "x")),
    "owned, served name": bad("spec.engine.args[0]", "servedName", args("--served-model-name", "x")),
    "owned, host": bad("spec.engine.args[0]", _OPTION, args("--host=0.0.0.0")),
    "owned, executor": bad("spec.engine.args[0]", "workers are processes", args("--distributed-executor-backend", "mp")),
    "owned, of a role": bad("spec.decode.args[2]", "(--data-parallel-size)", {"spec.decode.args": ["--seed", "1", "-dp"]}),
    "option and value in one": bad("spec.engine.args[0]", "--max-model-len=VALUE", args("--max-model-len 1024")),
    # Across fields
    "replicas and scaling": bad("spec.decode", "keep replicas for a fixed count, or scaling", decode=_BOTH),
    "min above max": bad("spec.decode.scaling.min", "must be at most max (2)", decode={"scaling": {"min": 3, "max": 2}}),
    "max of nothing": bad("spec.decode.scaling.max", "from 1", decode={"scaling": {"min": 1, "max": 0}}),
    "scaling without max": bad("spec.decode.scaling.max", "required", decode={"scaling": {"min": 1}}),
    "no decode": bad("spec.decode.replicas", "at least 1", decode={"replicas": 0}),
    "decode scaled to nothing": bad("spec.prefill.replicas", "must be 0, as decode",
                                   decode={"scaling": {"min": 0, "max": 2}}),
    "no prefill and reject": bad(
        "spec.prefill.replicas", "onNoPrefill: decode", prefill={"replicas": 0}, router={"onNoPrefill": "reject"}
    ),
    "tensor sizes that do not divide": bad(
        "spec.decode.parallelism.tensor",
        "must divide the other",
        {"spec.prefill.parallelism": {"tensor": 2}, "spec.decode.parallelism": {"tensor": 3}},
    ),
    "tensor of nothing": bad("spec.decode.parallelism.tensor", "from 1", {"spec.decode.parallelism": {"tensor": 0}}),
    "pods that do not divide the devices": bad(
        "spec.decode.parallelism.pods",
        "3 does not divide tensor 4 x pipeline 2; write 1 or 2 or 4 or 8",
        {"spec.decode.parallelism": {"tensor": 4, "pipeline": 2, "pods": 3}},
    ),
    "pods that do not divide the ranks": bad(
        "spec.decode.parallelism.pods",
        "2 does not divide data 3: each pod has whole ranks; write 1 or 3",
        {"spec.decode.parallelism": {"tensor": 2, "data": 3, "pods": 2}},
    ),
    "devices of all pods where those of one belong": bad(
        'spec.decode.resources.limits["nvidia.com/gpu"]',
        "must be 8, not 16: tensor 16 x pipeline 1 x data 1 over 2 pods",
        {"spec.decode.parallelism": {"tensor": 16, "pods": 2}, "spec.decode.resources": {"limits": {"nvidia.com/gpu": 16}}},
        server=False,
    ),
    "fewer GPUs than devices": bad(
        'spec.decode.resources.limits["nvidia.com/gpu"]',
        "must be 4, not 2",
        {"spec.decode.parallelism": {"tensor": 4}, "spec.decode.resources": {"limits": {"nvidia.com/gpu": 2}}},
        server=False,
    ),
    "GPUs as text": bad(
        'spec.decode.resources.limits["nvidia.com/gpu"]',
        "must be 1, not 2",
        {"spec.decode.resources": {"limits": {"nvidia.com/gpu": "2"}}},
        server=False,
    ),
    "nccl without GPUs": bad(
        "spec.prefill.resources",
        "nccl needs GPUs",
        {"spec.prefill.resources": {}},
        kv={"transport": "nccl"},
        server=False,
    ),
    "nccl on a part of a GPU": bad(
        "spec.decode.resources",
        "not on nvidia.com/mig-3g.40gb",
        {"spec.decode.resources": {"limits": {"nvidia.com/mig-3g.40gb": 1}}},
        kv={"transport": "nccl"},
        server=False,
    ),
    "nccl on GPUs of another vendor": bad(
        "spec.decode.resources",
        "not on amd.com/gpu",
        {"spec.decode.parallelism": {"device": "amd.com/gpu"}},
        kv={"transport": "nccl"},
        server=False,
    ),
    "nccl on what a template names": bad(
        "spec.decode.resources",
        "not on nvidia.com/mig-3g.40gb",
        {"spec.decode.template": {"spec": {"containers": [
            {"name": "main", "resources": {"limits": {"nvidia.com/mig-3g.40gb": 1}}}]}}},
        server=False,
        kv={"transport": "nccl"},
    ),
    "nccl beside a template that names nothing": bad(
        "spec.decode.resources",
        "nccl needs GPUs",
        {"spec.decode": {"resources": {}, "template": {}}},
        server=False,
        kv={"transport": "nccl"},
    ),
    "nccl on CPUs": bad(
        "spec.decode.resources",
        "nccl needs GPUs",
        {"spec.decode": {"parallelism": {"device": "none"}, "resources": {"limits": {"memory": "8Gi"}}}},
        kv={"transport": "nccl"},
        server=False,
    ),
    "fewer GPUs of another vendor": bad(
        'spec.decode.resources.limits["amd.com/gpu"]',
        "must be 4, not 2",
        {"spec.decode": {"parallelism": {"tensor": 4}, "resources": {"limits": {"amd.com/gpu": 2}}}},
        server=False,
    ),
    "fewer parts of GPUs": bad(
        'spec.decode.resources.requests["nvidia.com/mig-3g.40gb"]',
        "must be 2, not 1",
        {"spec.decode": {"parallelism": {"tensor": 2}, "resources": {"requests": {"nvidia.com/mig-3g.40gb": 1}}}},
        server=False,
    ),
    "a device of a vendor that nobody knows": bad(
        'spec.decode.resources.limits["example.com/npu"]',
        "is example.com/npu what engines compute on?",
        {"spec.decode": {"parallelism": {"tensor": 2}, "resources": {"limits": {"example.com/npu": 1}}}},
        server=False,
    ),
    "fewer devices of a vendor that the API server does not count": bad(
        'spec.decode.resources.limits["hygon.com/dcu"]',
        "if the engine runs on something else, write parallelism.device",
        {"spec.decode": {"parallelism": {"tensor": 2}, "resources": {"limits": {"hygon.com/dcu": 1}}}},
        server=False,
    ),
    "a token in two places": bad(
        "spec.engine.env[0].name",
        "HF_TOKEN would take the place of what spec.model.tokenSecret says",
        {"spec.model.tokenSecret": {"name": "hub", "key": "token"},
         "spec.engine": {"env": [{"name": "HF_TOKEN", "value": "x"}]}},
        server=False,
    ),
    "a cache in two places": bad(
        "spec.engine.env[0].name",
        "HF_HOME would take the place of what spec.model.cache says",
        {"spec.model.cache": {"claim": "weights"}, "spec.engine": {"env": [{"name": "HF_HOME", "value": "/x"}]}},
        server=False,
    ),
    "a token in a template": bad(
        "spec.template.spec.containers[0].env[0].name",
        "HF_TOKEN would take the place of what spec.model.tokenSecret says",
        {"spec.model.tokenSecret": {"name": "hub", "key": "token"},
         "spec.template": {"spec": {"containers": [{"name": "main", "env": [{"name": "HF_TOKEN", "value": "x"}]}]}}},
        server=False,
    ),
    "more devices in the template": bad(
        'spec.decode.template.spec.containers[0].resources.limits["nvidia.com/gpu"]',
        "must be 1, not 4",
        {"spec.decode.template": {"spec": {"containers": [
            {"name": "main", "resources": {"limits": {"nvidia.com/gpu": 4}}}]}}},
        server=False,
    ),
    "a device that is no key": bad(
        "spec.decode.parallelism.device", "write the key of a resource", {"spec.decode.parallelism": {"device": "gpu"}}
    ),
    "a topology that is no label": bad(
        "spec.engine.topology",
        "write the key of a label",
        {"spec.decode": {"parallelism": {"tensor": 2, "pods": 2}}, "spec.engine.topology": "a b"},
    ),
    "a topology of one pod": bad(
        "spec.engine.topology", "parallelism.pods above 1", {"spec.engine.topology": "zone"}
    ),
    "no device and one that is named": bad(
        "spec.decode.parallelism.device",
        'resources.limits["amd.com/gpu"] names a device',
        {"spec.decode": {"parallelism": {"device": "none"}, "resources": {"limits": {"amd.com/gpu": 1}}}},
        server=False,
    ),
    "no device and one that a template names": bad(
        "spec.decode.parallelism.device",
        'template.spec.containers[0].resources.limits["nvidia.com/gpu"] names a device',
        {"spec.decode": {"parallelism": {"device": "none"}, "template": {"spec": {"containers": [
            {"name": "main", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}}}},
        server=False,
    ),
    "no device and one that is claimed": bad(
        "spec.decode.parallelism.device",
        "resources.claims names a device",
        {"spec.decode": {"parallelism": {"device": "none"}, "resources": {"claims": [{"name": "gpu"}]}}},
        server=False,
    ),
    "command of main": bad(
        "spec.decode.template.spec.containers[0].command",
        "xpyd starts the container main",
        {"spec.decode.template": {"spec": {"containers": [{"name": "main", "command": ["sh"]}]}}},
        server=False,
    ),
    "no memory for KV": bad("spec.kv.memory", "at least 1", kv={"memory": 0}),
    "no memory for KV, in units": bad("spec.kv.memory", "above 0", kv={"memory": "0.0Gi"}),
    "offload to nowhere": bad("spec.kv.offload", "names no place", kv={"offload": {}}),
    "offload to no memory": bad("spec.kv.offload.memory", "above 0", kv={"offload": {"memory": "0Gi"}}),
    "offload to no disk": bad("spec.kv.offload.disk", "at least 1", kv={"offload": {"memory": "1Gi", "disk": 0}}),
    "a store without its connector": bad("spec.kv.offload.store.connector", "required", kv={"offload": {"store": {}}}),
    "a store that hands over": bad(
        "spec.kv.offload.store.connector", "hands KV from engine to engine",
        kv={"offload": {"store": {"connector": "NixlConnector"}}}),
    "vLLM's own offloading as a store": bad(
        "spec.kv.offload.store.connector", "write spec.kv.offload.memory",
        kv={"offload": {"store": {"connector": "OffloadingConnector"}}}),
    "a store by its file": bad(
        "spec.kv.offload.store.connector", "e.g. mine.store.Mine",
        kv={"offload": {"store": {"connector": "mine/store.py"}}}),
    "an audit of more than all": bad("spec.kv.audit", "from 0 to 1", kv={"audit": 1.5}),
    "offloading by vLLM's option": bad(
        "spec.engine.args[0]", "write spec.kv.offload.memory", {"spec.engine.args": ["--kv-offloading-size", "64"]}),
    "another backend by vLLM's option": bad(
        "spec.decode.args[0]", "spec.kv.offload.store", {"spec.decode.args": ["--kv_offloading_backend=lmcache"]}),
    "a transfer configuration of the user's own": bad(
        "spec.prefill.args[0]", "spec.kv.offload", {"spec.prefill.args": ['--kv-transfer-config={"kv_connector": "x"}']}),
    **{
        f"shared memory in {path}": bad(
            "spec.kv.sharedMemory.hostPath", words, kv={"transport": "shm", "sharedMemory": {"hostPath": path}}
        )
        for path, words in (
            ("//", "the node's system"), ("/etc", "the node's system"), ("/etc/kubernetes", "the node's system"),
            ("//var//lib", "the node's system"), ("/usr/", "the node's system"), ("/proc/1/root", "the node's system"),
            ("/sys", "the node's system"), ("/root/kv", "the node's system"), ("/home/a", "the node's system"),
            ("/boot", "the node's system"), ("/lib/modules", "the node's system"), ("/lib64", "the node's system"),
            ("/bin", "the node's system"), ("/sbin", "the node's system"), ("/opt/x", "the node's system"),
            ("/dev/shm/../../etc", "must not go through"), ("/dev/shm/..", "must not go through"),
            ("/..", "must not go through"), ("/./etc", "must not go through"),
        )
    },
    "both ports the same": bad("spec.router.ports.members", "(10001)", router={"ports": {"members": 10001}}),
    "template of sidecars": bad("spec.router.template", "write decode.template", router={"template": {"spec": {}}}),
    "router's quantity": bad(
        "spec.router.resources.limits.memory", "quantity", router={"resources": {"limits": {"memory": "lots"}}},
        server=False,
    ),
    "router's claims": bad(
        "spec.router.resources.claims", "unknown field", router={"resources": {"claims": []}},
        server=False,
    ),
    **{f"gateway, {name}": bad(f"spec.router.gateway{at}", words, router={"gateway": GATEWAY | change} | more, server=by)
       for name, at, words, change, more, by in (
        ("none named", ".parentRefs", "names no Gateway", {"parentRefs": []}, {}, True),
        ("named twice", ".parentRefs[1]", "named before", {"parentRefs": [{"name": "a"}, {"name": "a"}]}, {}, False),
        ("a listener beside all", ".parentRefs[1]", "another sectionName",
         {"parentRefs": [{"name": "a"}, {"name": "a", "sectionName": "b"}]}, {}, False),
        ("a name no label holds", ".parentRefs[0].name", "at most 63", {"parentRefs": [{"name": "a" * 64}]}, {}, False),
        ("of another kind", ".parentRefs[0].kind", "unknown field",
         {"parentRefs": [{"name": "a", "kind": "Service"}]}, {}, False),
        ("host with a port", ".hostnames[0]", "such as chat.example.com", {"hostnames": ["a:80"]}, {}, True),
        ("host in capitals", ".hostnames[0]", "in lower case", {"hostnames": ["Chat.example.com"]}, {}, True),
        ("path that ends in a slash", ".path", "no slash at its end", {"path": "/qwen/"}, {}, True),
        ("path of no beginning", ".path", "beginning of a path", {"path": "qwen"}, {}, True),
        ("path upwards", ".path", "beginning of a path", {"path": "/a/../b"}, {}, True),
        ("the routers' own path", ".path", "routers answer at /v1", {"path": "/v1"}, {}, True),
        ("below the routers' own path", ".path", "routers answer at /v1", {"path": "/v1/chat"}, {}, True),
        ("pool without a picker", ".pool.picker", "required", {"pool": {}}, {}, True),
        ("pool of HTTPS", ".pool", "plain HTTP", {"pool": {"picker": "epp"}, "tls": {"hostname": "a"}},
         {"tls": {"secret": "s"}}, True),
        ("HTTPS that it cannot know", ".tls", "is needed where tls.secret is", {}, {"tls": {"secret": "s"}}, True),
        ("HTTPS that is none", ".tls", "only for routers that serve HTTPS", {"tls": {"hostname": "a"}}, {}, True),
        ("any name of a certificate", ".tls.hostname", "such as chat",
         {"tls": {"hostname": "*.a"}}, {"tls": {"secret": "s"}}, True),
    )},
    "rest below nothing": bad("spec.router.skipPrefill.belowTokens", "from 0", router={"skipPrefill": {"belowTokens": -1}}),
    "host with a port": bad("spec.router.hosts[0]", "without a port", router={"hosts": ["a:80"]}),
    "origin with a path": bad("spec.router.cors.origins[0]", "no path", router={"cors": {"origins": ["https://a/"]}}),
    "collector without a scheme": bad(
        "spec.router.tracing.endpoint", "http://host:port", router={"tracing": {"endpoint": "collector:4318"}}
    ),
    "nothing in flight": bad("spec.router.maxInFlight", "not 0", router={"maxInFlight": 0}),
    "nothing may move": bad(
        "spec.rollout.maxUnavailable", "when maxSurge is 0", rollout={"maxSurge": 0, "maxUnavailable": 0}
    ),
    "nothing may move, in shares": bad(
        "spec.rollout.maxUnavailable", "when maxSurge is 0", rollout={"maxSurge": "0%", "maxUnavailable": 0}
    ),
    "more missing than there are": bad("spec.rollout.maxUnavailable", "0% to 100%", rollout={"maxUnavailable": "101%"}),
    "a surge that is no share": bad("spec.rollout.maxSurge", "0% to 999%", rollout={"maxSurge": "10"}),
    "planner without scaling": bad(
        "spec.planner.mode", "write prefill.scaling", planner={"mode": "auto", "slo": {"ttftP95": "2s"}}
    ),
    "planner without a goal": bad("spec.planner.slo", "ttftP95, tpotP95 or both", planner={"mode": "observe"}),
    "more than the limit": bad("spec.limits.maxInstances", "at least 4", limits={"maxInstances": 3}),
    "clients without a policy": bad(
        "spec.networkPolicy.enabled", "must be true", networkPolicy={"enabled": False, "clients": [{"podSelector": {}}]}
    ),
    "a field of a rule that no NetworkPolicy has": bad(
        "spec.networkPolicy.egress[0].port", "write ports", server=False, networkPolicy={"egress": [{"port": 8443}]}
    ),
    "revision of a folder": bad(
        "spec.model.revision", "only for a hub id", {"spec.model": {"source": "/models/x", "revision": "main"}}
    ),
    "cache of a volume": bad(
        "spec.model.cache",
        "only for a hub id",
        {"spec.model": {"source": "pvc://models/x", "cache": {"claim": "c"}}},
    ),
    "token of a bucket": bad(
        "spec.model.tokenSecret",
        "only for a hub id; s3://models/x is read without it",
        {"spec.model": {"source": "s3://models/x", "tokenSecret": {"name": "a", "key": "b"}}},
    ),
    "cache of an image": bad(
        "spec.model.cache",
        "only for a hub id",
        {"spec.model": {"source": "oci://host/x:v1/models", "cache": {"claim": "c"}}},
    ),
}
