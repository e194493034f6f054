"""One DisaggService in the cluster on real CPU engines, and what tests ask of it: counts, pods, traffic from a pod."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from testcluster.errors import CommandFailed
from testcluster.full import FullCluster
from testcluster.kubectl import wait_until

from xpyd_sidecar.contract.ids import join_host_port

ROOT = Path(__file__).resolve().parent.parent.parent
LOAD = ROOT / "e2e" / "inside" / "load.py"
MODEL = ROOT / "examples" / "model" / "weights"
CHILDREN = ("pods,services,secrets,networkpolicies,poddisruptionbudgets,disaggpools,deployments,daemonsets,jobs,"
            "endpointslices,configmaps")
"""Kinds of what a service may leave in its namespace."""
ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Of engines. By default vLLM would pin those of all pods to the same core."""
LEAST = 10
"""Requests of a load that means something; one of them is long."""
START_S = 700
"""Four engines at most share two cores with the cluster; one alone is ready after about a minute."""

ASK = """
import json, sys, urllib.request
body = {"model": "tiny", "messages": [{"role": "user", "content": "What is xpyd?"}], "max_tokens": 40, "temperature": 0}
head = {"Content-Type": "application/json"}
for url in sys.argv[1:]:
    request = urllib.request.Request(url + "/chat/completions", json.dumps(body).encode(), head)
    print(urllib.request.urlopen(request, timeout=100).read().decode())
"""
"""A program that asks a chat of each URL that it is given, and prints the answers."""
CONNECT = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor

def tried(address):
    host, _, port = address.rpartition(":")
    patience_s = 30 if port == "10001" else 4  # of clients, who are let in however long it takes
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=patience_s).close()
        return "open"
    except OSError as error:
        return "refused" if isinstance(error, ConnectionRefusedError) else "blocked"

with ThreadPoolExecutor(8) as pool:
    for address, found in zip(sys.argv[1:], pool.map(tried, sys.argv[1:])):
        print(address, found, flush=True)
"""
METRICS = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8000/metrics').read().decode())"
LISTENING = """
found = set()
for file in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(file).read().splitlines()[1:]:
        address, _, port = line.split()[1].rpartition(":")
        if line.split()[3] == "0A" and not address.endswith(("0100007F", "00000000000000000000000001000000")):
            found.add(int(port, 16))
print(*sorted(found))
"""
"""Ports of a network namespace on which somebody listens, but for those on loopback."""


class Images:
    """What was built, and which folders of the host hold vLLM."""

    def __init__(self, built: dict[str, Any], paths: dict[str, Any]) -> None:
        self.built = built
        self.paths = paths

    def name(self, which: str) -> str:
        """Full name of an image."""
        return str(self.built[which]["image"])


class Ended(msgspec.Struct):
    """One request of the traffic."""

    at: float
    s: float
    n: int
    long: bool
    fault: str


class ServiceInCluster:
    """``tiny`` in a namespace of its own."""

    name = "tiny"
    namespace = "serving"

    def __init__(self, cluster: FullCluster, images: Images, shared: Path | None = None) -> None:
        """``shared``: a folder of the node, for the sockets over which engines of it pass each other memory."""
        self.cluster = cluster
        self.images = images
        self._shared = shared

    def document(self) -> dict[str, Any]:
        """1P1D; vLLM and the model come from folders of the host, as tests have no registry."""
        folders = [*self.images.paths["mounts"], {"name": "weights", "path": str(MODEL)}]
        volumes = [{"name": each["name"], "hostPath": {"path": each["path"], "type": "Directory"}} for each in folders]
        mounts = [{"name": each["name"], "mountPath": each["path"], "readOnly": True} for each in folders]
        template = {"spec": {"volumes": volumes, "containers": [{"name": "main", "volumeMounts": mounts}]}}
        role = {"resources": {}, "template": template}
        return {
            "apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService",
            "metadata": {"name": self.name, "namespace": self.namespace},
            "spec": {
                "model": {"source": str(MODEL), "servedName": "tiny"},
                "engine": {
                    "image": self.images.name("engine-cpu"),
                    "args": ["--enforce-eager", "--max-model-len", "1024", "--dtype", "float32",
                             "--num-gpu-blocks-override", "64"],
                    "env": [{"name": name, "value": value} for name, value in ENV.items()],
                },
                "prefill": {"replicas": 1, **role},
                "decode": {"scaling": {"min": 1, "max": 3}, **role},
                "kv": {"sharedMemory": {"hostPath": str(self._shared)}} if self._shared is not None else {},
                "drain": {"timeout": "60s"},
            },
        }

    def kubectl(self, *arguments: str, timeout_s: float = 60.0, stdin: str | None = None) -> str:
        """kubectl in the namespace of the service."""
        return self.cluster.kubectl("-n", self.namespace, *arguments, timeout_s=timeout_s, stdin=stdin)

    def get(self, *arguments: str) -> Any:
        """``kubectl get … -o json`` in the namespace of the service."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))

    def apply(self) -> None:
        """As a user does. vLLM comes by hostPath here, which the level ``restricted`` does not allow."""
        self.cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {
            "name": self.namespace, "labels": {"pod-security.kubernetes.io/enforce": "privileged"}}})
        self.cluster.kubectl.apply(self.document())

    def wait_ready(self, shape: str | None = None, deadline_s: float = START_S) -> None:
        """``kubectl wait``, then until ``shape`` instances (such as ``1P2D``) serve."""
        try:
            self._wait_condition(deadline_s)
            if shape is not None:
                wait_until(lambda: self.get(f"dsvc/{self.name}")["status"]["ready"] == shape, deadline_s, f"{shape} serve")
        except Exception as error:
            raise AssertionError(f"{error}\n{self.story()}") from error

    def _wait_condition(self, deadline_s: float) -> None:
        """A change of its CRD has the API server make its handler anew; kubectl gives up where it asks just then."""
        end = time.monotonic() + deadline_s
        while True:
            left = max(1.0, end - time.monotonic())
            try:
                self.kubectl("wait", "--for=condition=Ready", f"dsvc/{self.name}", f"--timeout={left:.0f}s",
                             timeout_s=left + 10)
            except CommandFailed as error:
                if "could not find the requested resource" not in str(error) or time.monotonic() > end:
                    raise
                print(f"asked for again: {error}")
                time.sleep(0.5)
            else:
                return

    def story(self) -> str:
        """What a person would look at when something is wrong."""
        parts = []
        for command in (("get", "pods", "-o", "wide"), ("get", f"dsvc/{self.name}", "-o", "yaml"),
                        ("get", "events", "--sort-by=.lastTimestamp")):
            with contextlib.suppress(CommandFailed):
                parts.append(self.kubectl(*command)[-4000:])
        for pod in self.pods():
            with contextlib.suppress(CommandFailed):
                parts.append(self.kubectl("logs", pod, "-c", "main", "--tail=20")[-3000:])
            with contextlib.suppress(CommandFailed):
                parts.append(self.kubectl("logs", pod, "-c", "sidecar", "--tail=10")[-2000:])
        with contextlib.suppress(CommandFailed):
            operator = ("-n", "xpyd-system", "-l", "app.kubernetes.io/name=xpyd-operator")
            parts.append(self.cluster.kubectl("logs", *operator, "--tail=30", "--prefix")[-6000:])
        return "\n".join(parts)

    def status(self) -> Any:
        """Of the DisaggService; empty while nobody has written one."""
        return self.get(f"dsvc/{self.name}").get("status") or {}

    def condition(self, kind: str) -> dict[str, Any]:
        """One of its conditions; with empty values where there is none of that kind."""
        found = (each for each in self.status().get("conditions", ()) if each["type"] == kind)
        return next(found, {"status": "", "reason": "", "message": ""})

    def left(self) -> list[str]:
        """What is there in the namespace, but for what every namespace has."""
        names = [f"{item['kind']} {item['metadata']['name']}" for item in self.get(CHILDREN)["items"]]
        return [name for name in names if name != "ConfigMap kube-root-ca.crt"]

    def pods(self, role: str | None = None) -> list[str]:
        """Names of the engine pods that are not ending, by name."""
        return list(self.uids(role))

    def uids(self, role: str | None = None) -> dict[str, str]:
        """Name → uid of these. A pod may come after another one of the same name."""
        selector = f"xpyd.dev/service={self.name}" + (f",xpyd.dev/role={role}" if role else "")
        found = [pod["metadata"] for pod in self.get("pods", "-l", selector)["items"]]
        return dict(sorted((pod["name"], pod["uid"]) for pod in found if "deletionTimestamp" not in pod))

    def metric(self, pod: str, name: str, label: str = "") -> float:
        """Sum over the series of a metric of the engine in a pod, of those with a label (``name="value"``); 0: none yet."""
        text = self.kubectl("exec", pod, "-c", "main", "--", "python3", "-c", METRICS)
        lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if label in line)

    def scale(self, role: str, count: int) -> None:
        """``kubectl scale dpool``."""
        self.kubectl("scale", f"dpool/{self.name}-{role}", f"--replicas={count}")

    def remove(self) -> None:
        """Delete the service and its namespace."""
        with contextlib.suppress(CommandFailed):
            self.cluster.kubectl("delete", "namespace", self.namespace, "--ignore-not-found", "--timeout=120s",
                                 timeout_s=130)

    def python(self, namespace: str, name: str, program: str, *arguments: str, timeout_s: float = 60.0,
               labels: Mapping[str, str] = MappingProxyType({})) -> str:
        """Run a Python program in a pod of its own until it ends; what it printed."""
        self._client_pod(namespace, name, program, arguments, labels)
        try:
            wait_until(lambda: self._phase(namespace, name) in ("Succeeded", "Failed"), timeout_s, f"pod {name} ended")
            said = self.cluster.kubectl("-n", namespace, "logs", name)
            assert self._phase(namespace, name) == "Succeeded", said
            return said
        finally:
            self._delete_client(namespace, name)

    @contextlib.contextmanager
    def traffic(self, at_once: int = 4, pause_s: float = 3.0, host: str = "", *,
                least: int = LEAST) -> Iterator[list[Ended]]:
        """Rounds of requests from a pod of another namespace while the block runs; the list is filled when it ends.

        It goes on until ``least`` have ended, however slow the machine is. ``host``: of a router; without it by the
        service's name.
        """
        ended: list[Ended] = []
        name = f"load-{time.time_ns() % 10**9}"
        url = f"http://{join_host_port(host or f'{self.name}.{self.namespace}.svc', 10001)}/v1"
        self._client_pod("clients", name, LOAD.read_text("utf-8"), (url, "tiny", str(at_once), str(pause_s)))
        try:
            wait_until(lambda: self.cluster.kubectl("-n", "clients", "logs", name) != "", 240, "the first request ended")
            yield ended
            wait_until(lambda: self.cluster.kubectl("-n", "clients", "logs", name).count("\n") >= least, 600,
                       f"{least} requests ended")
            self.cluster.kubectl("-n", "clients", "exec", name, "--", "python3", "-c", "import os; os.kill(1, 15)")
            wait_until(lambda: self._phase("clients", name) == "Succeeded", 600, "the traffic ended")
            lines = self.cluster.kubectl("-n", "clients", "logs", name).splitlines()
            ended.extend(msgspec.json.decode(line, type=Ended) for line in lines)
        finally:
            self._delete_client("clients", name)

    def _phase(self, namespace: str, name: str) -> str:
        return str(self.cluster.kubectl.get("-n", namespace, f"pod/{name}")["status"].get("phase"))

    def _client_pod(self, namespace: str, name: str, program: str, arguments: tuple[str, ...],
                    labels: Mapping[str, str] = MappingProxyType({})) -> None:
        restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        self.cluster.kubectl.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}},
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace},
             "data": {"program.py": program}},
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace, "labels": dict(labels)},
             "spec": {
                "restartPolicy": "Never", "terminationGracePeriodSeconds": 0,
                "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{"name": "main", "image": self.images.name("sidecar"), "imagePullPolicy": "IfNotPresent",
                                "command": ["python3", "-u", "/program/program.py", *arguments],
                                "securityContext": restricted,
                                "volumeMounts": [{"name": "program", "mountPath": "/program"}]}],
                "volumes": [{"name": "program", "configMap": {"name": name}}]}})

    def _delete_client(self, namespace: str, name: str) -> None:
        self.cluster.kubectl("-n", namespace, "delete", f"pod/{name}", f"configmap/{name}", "--ignore-not-found")


def check(ended: list[Ended], least: int = LEAST) -> None:
    """Nothing failed, and enough was asked for it to mean something; long streams among it."""
    failed = [each for each in ended if each.fault]
    print(f"{len(ended)} requests, {sum(each.long for each in ended)} of them long, {len(failed)} failed")
    assert not failed, failed[:5]
    assert len(ended) >= least
    assert any(each.long for each in ended)


def asked(service: ServiceInCluster, *urls: str) -> list[str]:
    """The answers to one question by each URL, from a pod of another namespace."""
    lines = service.python("clients", "ask", ASK, *urls, timeout_s=240).splitlines()
    return [str(json.loads(line)["choices"][0]["message"]["content"]) for line in lines]


def listening(service: ServiceInCluster, pod: str) -> list[int]:
    """Ports of an engine's pod that something listens on."""
    found = service.kubectl("exec", pod, "-c", "main", "--", "python3", "-c", LISTENING)
    return [int(port) for port in found.split()]


def strangers_reach_the_router_alone(service: ServiceInCluster) -> None:
    """A pod of another namespace tries every port of a decode pod that something listens on, by all its addresses."""
    (decode,) = service.get("pods", "-l", "xpyd.dev/role=decode")["items"]
    ports = listening(service, decode["metadata"]["name"])
    assert {8000, 10001, 10002, 30001} <= set(ports), "engine, router and membership listen"
    assert len(ports) > 3, "so does the connector"
    addresses = [each["ip"] for each in decode["status"]["podIPs"]]
    tried = [join_host_port(address, port) for address in addresses for port in ports]
    name = f"{service.name}.{service.namespace}.svc:10001"
    said = service.python("strangers", "probe", CONNECT, *tried, name, timeout_s=180)
    found = dict(line.split() for line in said.splitlines())
    assert found.pop(name) == "open"
    assert [found.pop(join_host_port(address, 10001)) for address in addresses] == ["open"] * len(addresses)
    assert set(found.values()) == {"blocked"}, found
