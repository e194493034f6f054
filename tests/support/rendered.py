"""Everything that both backends make of a document, as text to compare with what stands in ``tests/golden``."""

from __future__ import annotations

from pathlib import Path

import msgspec
import yaml

from xpyd_operator.api.decode import decode_service
from xpyd_operator.api.load import documents
from xpyd_operator.api.recognize import DocumentKind, recognize
from xpyd_operator.api.rule import Target
from xpyd_operator.api.service import DisaggService
from xpyd_operator.render.engine import engine_revision
from xpyd_operator.render.objects import manifests
from xpyd_operator.render.pod import pod_revision
from xpyd_operator.render.process import (
    EngineBinding,
    ProcessPlace,
    agent_config,
    engine_process,
    model_of,
    port_args,
    router_config,
    sidecar_process,
    sidecar_revision,
)
from xpyd_operator.render.settings import KubeSettings
from xpyd_sidecar.contract.ids import HostPort, InstanceName, Role

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = KubeSettings(sidecar_image="xpyd-sidecar:1")
PLACE = ProcessPlace(python="/usr/bin/python3", key_file="/run/x/key", run_dir="/run/x/e0", host="127.0.0.1")


def services(file: Path, target: Target) -> list[DisaggService]:
    """The services of a file."""
    found = [each.value for each in documents(file.read_text()) if recognize(each.value) is DocumentKind.SERVICE]
    return [decode_service(each, target=target).service for each in found]


def kubernetes(service: DisaggService) -> str:
    """The objects that the operator would make, and the revisions of both roles."""
    revisions = {role.value: pod_revision(service, role, "key") for role in Role}
    return _text([{"revisions": revisions}, *manifests(service, SETTINGS)])


def local(service: DisaggService) -> str:
    """The processes of one instance of each role, with GPUs and without, and of the router."""
    found = []
    for role in Role:
        for devices in ((), tuple(range(service.spec.role(role).parallelism.devices))):
            binding = EngineBinding(InstanceName(f"{service.name}-e0"), role, devices)
            process = engine_process(service, PLACE, binding)
            agent = agent_config(service, PLACE, binding, 8100, (HostPort("127.0.0.1:30001"),))
            found.append({
                "revision": engine_revision(service, role, model_of(service)),
                "engine": {"argv": [*process.argv, *port_args(process, 8100)], "env": process.env},
                "agent": agent,
            })
    router = router_config(service, PLACE, "127.0.0.1")
    command = sidecar_process(PLACE.python, "/run/x/router.json")
    found.append({"router": router, "process": command, "revision": sidecar_revision(router)})
    return _text(found)


def _text(parts: list[object]) -> str:
    """YAML in the order in which things were made."""
    return yaml.safe_dump_all(msgspec.to_builtins(parts), sort_keys=False, width=120, allow_unicode=True)
