"""The two CustomResourceDefinitions, made from the structs. Each has one version."""

from __future__ import annotations

from typing import Any

import yaml

from xpyd_operator.api.base import GROUP, VERSION
from xpyd_operator.api.pool import DisaggPool
from xpyd_operator.api.schema import Schema, schema_of, with_rules
from xpyd_operator.api.service import DisaggService

_READY = '.status.conditions[?(@.type=="Ready")].status'
_REASON = ".status.conditions[0].reason"
"""Reason of the first condition: that is ``Ready``, or ``Suspended`` of a service that is suspended."""
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
        schema=with_rules(schema_of(DisaggService)),
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
        schema=_pool_schema(),
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


def _pool_schema() -> Schema:
    schema = schema_of(DisaggPool)
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


def _crd(
    *,
    plural: str,
    kind: str,
    short: str,
    schema: Schema,
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
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": schema},
                    "subresources": subresources,
                    "additionalPrinterColumns": printed,
                }
            ],
        },
    }
