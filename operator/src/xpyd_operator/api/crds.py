"""The two CustomResourceDefinitions, made from the structs.

Each is served in two versions, stored as the newer one, and converted by nobody: the versions are one schema but for the
defaults that have older words (``words``). In the files the schema of the second refers to that of the first.
"""

from __future__ import annotations

from typing import Any

import yaml

from xpyd_operator.api.base import FIRST_VERSION, GROUP, VERSION
from xpyd_operator.api.pool import DisaggPool
from xpyd_operator.api.schema import Schema, schema_of, with_rules
from xpyd_operator.api.service import DisaggService

VERSIONS = (VERSION, FIRST_VERSION)
_READY = '.status.conditions[?(@.type=="Ready")].status'
_REASON = '.status.conditions[?(@.type=="Ready")].reason'
_HEAD = "# Made by `xpyd render crds` from operator/src/xpyd_operator/api; do not edit.\n"


def crds() -> dict[str, Schema]:
    """File name to CRD."""
    return {"disaggservices.yaml": service_crd(), "disaggpools.yaml": pool_crd()}


def to_yaml(crd: Schema) -> str:
    """The text of a file in ``crds/``; the same for the same structs, byte for byte."""
    return _HEAD + yaml.safe_dump(crd, sort_keys=False, width=120, allow_unicode=True)


def service_crd() -> Schema:
    """CRD of DisaggService."""
    return _crd(
        plural="disaggservices",
        kind="DisaggService",
        short="dsvc",
        schemas={version: with_rules(schema_of(DisaggService, version)) for version in VERSIONS},
        subresources={"status": {}},
        columns=[
            ("Model", "string", ".status.model", "Name that clients ask for"),
            ("Wanted", "string", ".status.wanted", "Wanted prefill and decode instances"),
            ("Serving", "string", ".status.ready", "Ready prefill and decode instances"),
            ("Ready", "string", _READY, "Whether requests are served"),
            ("Reason", "string", _REASON, "Why requests are not served, or not by all wanted instances"),
            ("URL", "string", ".status.url", "Where clients reach the service"),
            ("Age", "date", ".metadata.creationTimestamp", "Time since creation"),
        ],
    )


def pool_crd() -> Schema:
    """CRD of DisaggPool."""
    return _crd(
        plural="disaggpools",
        kind="DisaggPool",
        short="dpool",
        schemas={version: _pool_schema(version) for version in VERSIONS},
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        columns=[
            ("Service", "string", ".spec.service", "The DisaggService that owns the pool"),
            ("Role", "string", ".spec.role", "Role of the instances"),
            ("Wanted", "integer", ".spec.replicas", "Wanted instances"),
            ("Current", "integer", ".status.replicas", "Instances that exist"),
            ("Ready", "integer", ".status.readyReplicas", "Instances that serve"),
            ("Age", "date", ".metadata.creationTimestamp", "Time since creation"),
        ],
    )


def _pool_schema(version: str) -> Schema:
    schema = schema_of(DisaggPool, version)
    schema["x-kubernetes-validations"] = [
        {
            "rule": "self.metadata.name == self.spec.service + '-' + self.spec.role",
            "message": "metadata.name must be <spec.service>-<spec.role>",
        }
    ]
    for name in ("service", "role"):
        schema["properties"]["spec"]["properties"][name]["x-kubernetes-validations"] = [
            {"rule": "self == oldSelf", "message": f"{name} cannot be changed"}
        ]
    return schema


def shared(schema: Any, like: Any) -> Any:
    """The schema with what is equal in ``like``, at the same place, as the same object: YAML then refers to it."""
    if schema == like:
        return like
    if isinstance(schema, dict) and isinstance(like, dict):
        return {key: shared(part, like.get(key)) for key, part in schema.items()}
    return schema


def _crd(
    *,
    plural: str,
    kind: str,
    short: str,
    schemas: dict[str, Schema],
    subresources: dict[str, Any],
    columns: list[tuple[str, str, str, str]],
) -> Schema:
    printed = [{"name": name, "type": of, "jsonPath": path, "description": text} for name, of, path, text in columns]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "plural": plural,
                "singular": kind.lower(),
                "kind": kind,
                "listKind": f"{kind}List",
                "shortNames": [short],
                "categories": ["xpyd"],
            },
            "conversion": {"strategy": "None"},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": version == VERSION,
                    "schema": {"openAPIV3Schema": shared(schema, schemas[VERSION])},
                    "subresources": subresources,
                    "additionalPrinterColumns": printed,
                }
                for version, schema in schemas.items()
            ],
        },
    }
