"""What would be right, for each kind of text that fields hold (see ``base``)."""

from __future__ import annotations

from typing import Final

from xpyd_operator.api import source

RIGHT: Final = {
    "size": "write bytes as a number and a unit, e.g. 2Gi or 500M",
    "share": "write bytes (2Gi, 500M) or a share of the device's memory (10%)",
    "count": "write a number of instances, or a share of those wanted, from 0% to 999%",
    "part": "write a number of instances, or a share of those wanted, from 0% to 100%",
    "quantity": "write a Kubernetes quantity, e.g. 2, 500m or 16Gi",
    "duration": "write a number and a unit (ms, s, m, h), e.g. 30s or 1h30m",
    "source": f"write {source.FORMS}",
    "name": "a name in Kubernetes: lower-case letters, digits, '-' and '.', beginning and ending with a letter or digit",
    "service": "lower-case letters, digits and '-', beginning with a letter and ending with a letter or digit",
    "key": "letters, digits, '-', '_' and '.'",
    "env": "letters, digits, '_', '-' and '.', not beginning with a digit",
    "path": "write an absolute path without a colon",
    "header": "the name of a header: letters, digits, '-' and '_', beginning with a letter or digit",
    "host": "the name or address of a host, without a port",
    "device": "write the key of a resource, e.g. nvidia.com/gpu or amd.com/gpu, or none",
    "label": "write the key of a label, e.g. topology.kubernetes.io/zone",
    "class": "write the name of the class alone; its Python module goes into module",
    "module": "write the name of a Python module, e.g. mine.store",
    "origin": "write https://host, with a port where it has one and no path, in lower case, or *",
    "url": "write http://host:port or https://host:port",
}
"""By kind; said after what is wrong."""
