"""The root of the API's structs, and the kinds of text that their fields hold.

A kind is a string with a meaning (a duration, a quantity …). It stays a string in the structs, so that what was written
comes back unchanged; the modules beside this one give it its meaning. The schema and the decoder read ``Meta``: its
constraints become OpenAPI, and ``extra`` says

    kind        which kind of text this is, for errors that say what would be right
    min, max    bounds of a duration, as text
    preserve    an object of Kubernetes' own: one setting to users, which the API server takes as it is. A struct that has
                it is decoded and judged by its fields here
    max_items, max_properties   bounds of lists and maps, which keep the cost of CEL rules bounded
    why_not     of a choice: values that people may look for and that are left out, each with the reason
    merge_key   the field by which server-side apply merges a list's items
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from xpyd_operator.api import source

GROUP: Final = "xpyd.dev"
VERSION: Final = "v1beta1"
"""The one version of the API."""
API_VERSION: Final = f"{GROUP}/{VERSION}"

DURATION_PATTERN: Final = r"^([0-9]+(\.[0-9]+)?(h|m|s|ms))+$"
QUANTITY_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][0-9]{1,2})?$"
SIZE_PATTERN: Final = r"^(0*[1-9][0-9]*(\.[0-9]+)?|0+\.0*[1-9][0-9]*)(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
"""Above 0."""
PERCENT_PATTERN: Final = r"^(0|[1-9][0-9]{0,2})%$"
TO_HUNDRED_PATTERN: Final = r"^(0|[1-9][0-9]?|100)%$"
OBJECT_NAME_PATTERN: Final = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
URL_PATTERN: Final = r"^https?://[^/?#@ ]+(/[^?# ]*)?$"
HOST_PATTERN: Final = r"^([A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])$"
ORIGIN_PATTERN: Final = r"^(\*|[a-z][a-z0-9+.-]*://([a-z0-9._~%-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?)$"
_OCTET: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_GROUP: Final = "[0-9a-f]{1,4}"
_IPV6: Final = "|".join(
    [
        f"({_GROUP}:){{7}}{_GROUP}",
        f"({_GROUP}:){{1,7}}:",
        f":(:{_GROUP}){{1,7}}",
        *(f"({_GROUP}:){{{before}}}(:{_GROUP}){{1,{7 - before}}}" for before in range(1, 7)),
    ]
)
NETWORK_PATTERN: Final = (
    rf"^(({_OCTET}\.){{3}}{_OCTET}/(3[0-2]|[12]?[0-9])|({_IPV6})/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
)
DEVICE_PATTERN: Final = r"^(none|[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)$"
LABEL_PATTERN: Final = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
DATA_KEY_PATTERN: Final = r"^[-._a-zA-Z0-9]+$"


class Part(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Any object of the API. Fields are camelCase on the wire; ``None`` and an absent field are the same."""


Count = Annotated[int, Meta(ge=0, le=1000)]
Positive = Annotated[int, Meta(ge=1, le=1000)]
Port = Annotated[int, Meta(ge=1024, le=65535)]
Text = Annotated[str, Meta(min_length=1, max_length=512)]
Argument = Annotated[str, Meta(min_length=1, max_length=2048)]
ObjectName = Annotated[str, Meta(min_length=1, max_length=253, pattern=OBJECT_NAME_PATTERN, extra={"kind": "name"})]
SecretKey = Annotated[str, Meta(min_length=1, max_length=253, pattern=DATA_KEY_PATTERN, extra={"kind": "key"})]
DeviceKey = Annotated[str, Meta(min_length=3, max_length=128, pattern=DEVICE_PATTERN, extra={"kind": "device"})]
LabelKey = Annotated[str, Meta(min_length=1, max_length=317, pattern=LABEL_PATTERN, extra={"kind": "label"})]
HostName = Annotated[str, Meta(min_length=1, max_length=253, pattern=HOST_PATTERN, extra={"kind": "host"})]
Origin = Annotated[str, Meta(min_length=1, max_length=512, pattern=ORIGIN_PATTERN, extra={"kind": "origin"})]
Network = Annotated[str, Meta(min_length=3, max_length=64, pattern=NETWORK_PATTERN, extra={"kind": "network"})]
Url = Annotated[str, Meta(min_length=8, max_length=512, pattern=URL_PATTERN, extra={"kind": "url"})]

Duration = Annotated[
    str, Meta(max_length=32, pattern=DURATION_PATTERN, extra={"kind": "duration", "min": "1s", "max": "168h"})
]
"""One second to a week."""
ShortDuration = Annotated[
    str, Meta(max_length=32, pattern=DURATION_PATTERN, extra={"kind": "duration", "min": "10ms", "max": "1h"})
]
"""Ten milliseconds to an hour."""
Latency = Annotated[
    str, Meta(max_length=32, pattern=DURATION_PATTERN, extra={"kind": "duration", "min": "1ms", "max": "1h"})
]
"""One millisecond to an hour."""
Window = Annotated[
    str, Meta(max_length=32, pattern=DURATION_PATTERN, extra={"kind": "duration", "min": "0s", "max": "24h"})
]
"""A duration that may be zero."""

Size = Annotated[
    Annotated[int, Meta(ge=1)] | Annotated[str, Meta(max_length=32, pattern=SIZE_PATTERN)], Meta(extra={"kind": "size"})
]
"""Bytes, above 0: ``2Gi``, ``500M``, or a plain number."""
CountOrShare = Annotated[
    Annotated[int, Meta(ge=0, le=1000)] | Annotated[str, Meta(max_length=4, pattern=PERCENT_PATTERN)],
    Meta(extra={"kind": "count"}),
]
"""Instances, or a share of those that are wanted: ``2``, ``10%``. See ``Rollout``."""
CountOrPart = Annotated[
    Annotated[int, Meta(ge=0, le=1000)] | Annotated[str, Meta(max_length=4, pattern=TO_HUNDRED_PATTERN)],
    Meta(extra={"kind": "part"}),
]
"""As ``CountOrShare``, and no share above all of them."""
Quantity = Annotated[
    Annotated[int, Meta(ge=0)] | Annotated[str, Meta(max_length=32, pattern=QUANTITY_PATTERN)],
    Meta(extra={"kind": "quantity"}),
]
"""A Kubernetes quantity: ``2``, ``500m``, ``16Gi``."""
Quantities = Annotated[dict[str, Quantity], Meta(extra={"max_properties": 16})]
Arguments = Annotated[tuple[Argument, ...], Meta(extra={"max_items": 64})]
HostNames = Annotated[tuple[HostName, ...], Meta(extra={"max_items": 64})]
Origins = Annotated[tuple[Origin, ...], Meta(extra={"max_items": 64})]
Networks = Annotated[tuple[Network, ...], Meta(extra={"max_items": 64})]
Preserved = Annotated[dict[str, Any], Meta(extra={"preserve": True})]
"""An object of Kubernetes' own schema."""

RIGHT: Final = {
    "size": "write bytes as a number above 0 and a unit, e.g. 2Gi or 500M",
    "count": "write a number of instances, or a share of those wanted, from 0% to 999%",
    "part": "write a number of instances, or a share of those wanted, from 0% to 100%",
    "quantity": "write a Kubernetes quantity, e.g. 2, 500m or 16Gi",
    "duration": "write a number and a unit (ms, s, m, h), e.g. 30s or 1h30m",
    "source": f"write {source.FORMS}",
    "adapter": "write letters, digits and -_.:/, beginning with a letter or digit",
    "adapterSource": f"write {source.ADAPTER_FORMS}",
    "name": "a name in Kubernetes: lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit",
    "service": "lower-case letters, digits and '-', beginning with a letter and ending with a letter or digit",
    "key": "letters, digits, '-', '_' and '.'",
    "env": "letters, digits, '_', '-' and '.', not beginning with a digit",
    "path": "write an absolute path without a colon",
    "host": "the name or address of a host, without a port",
    "device": "write the key of a resource, e.g. nvidia.com/gpu or amd.com/gpu, or none",
    "label": "write the key of a label, e.g. topology.kubernetes.io/zone",
    "class": "write the name that vLLM has for it, or a class with its Python module, e.g. mine.store.Mine",
    "network": "write a network with its prefix, e.g. 10.0.0.0/8 or fd00::/8",
    "certificate host": "write the one name in lower case that the certificate has, such as chat.example.com",
    "route host": "write a name of a host in lower case, such as chat.example.com or *.example.com",
    "prefix": "write the beginning of a path, such as /qwen, with no slash at its end",
    "origin": "write https://host, with a port where it has one and no path, in lower case, or *",
    "url": "write http://host:port or https://host:port",
}
"""By kind of text: what would be right, said after what is wrong."""


class SecretKeyRef(Part, frozen=True):
    """One key of a Secret in the namespace of the service."""

    name: ObjectName
    """Name of the Secret."""
    key: SecretKey
    """The key inside it."""
