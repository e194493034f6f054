"""The fields of Kubernetes' objects that a document preserves, written where ``xpyd check`` finds them.

    python scripts/kubernetes_fields.py [--check]

They are taken from the models of the ``kubernetes`` package that is installed, which are made from Kubernetes' own
OpenAPI: from those in ``ROOTS`` down, whatever they lead to. With ``--check`` nothing is written; the exit code is 1 where
the file is not what it would be. Run it after a new ``kubernetes`` in requirements.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

TARGET = Path(__file__).resolve().parent.parent / "operator/src/xpyd_operator/api/data/kubernetes_fields.json"
ROOTS = ("V1PodTemplateSpec", "V1NetworkPolicyPeer", "V1NetworkPolicyEgressRule", "V1EnvVarSource")
SCALARS = {"str": "text", "int": "int", "float": "number", "bool": "bool", "object": "any", "datetime": "text"}
QUANTITIES = {"limits", "requests", "overhead", "sizeLimit", "divisor"}
"""The models call a quantity text; a number is one, too."""


def parts() -> dict[str, dict[str, str]]:
    """By part: its fields and what each holds: ``text``, ``int``, ``number``, ``bool``, ``quantity``, ``any``, or a part;
    ``[x]`` is a list of it, ``{x}`` a map to it.
    """
    models = import_module("kubernetes.client.models")
    found: dict[str, dict[str, str]] = {}
    left = list(ROOTS)
    while left:
        model = left.pop()
        if name(model) in found:
            continue
        kind = getattr(models, model)
        fields: dict[str, str] = {}
        for attribute, of in kind.openapi_types.items():
            field = kind.attribute_map[attribute]
            inner = re.findall(r"\w+", of)[-1]
            if inner not in SCALARS:
                left.append(inner)
            word = SCALARS.get(inner) or name(inner)
            word = "quantity" if field in QUANTITIES else word
            fields[field] = f"[{word}]" if of.startswith("List") else f"{{{word}}}" if of.startswith("Dict") else word
        found[name(model)] = dict(sorted(fields.items()))
    return dict(sorted(found.items()))


def name(model: str) -> str:
    """A part's name in Kubernetes."""
    return re.sub(r"^(Core)?V1", "", model)


def text() -> str:
    """What the file holds: one line for each part."""
    lines = ",\n".join(f"    {json.dumps(part)}: {json.dumps(fields)}" for part, fields in parts().items())
    return f'{{\n  "version": "{version()}",\n  "parts": {{\n{lines}\n  }}\n}}\n'


def version() -> str:
    """The newest Kubernetes whose fields the models know: the package counts like its minor versions."""
    return f"1.{metadata.version('kubernetes').partition('.')[0]}"


def main(arguments: list[str]) -> int:
    """1 where the file is not what it would be, with ``--check``."""
    made: Any = text()
    if arguments != ["--check"]:
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        TARGET.write_text(made)
        return 0
    if TARGET.exists() and TARGET.read_text() == made:
        return 0
    sys.stderr.write(f"{TARGET}: not what the installed kubernetes says: run `python scripts/kubernetes_fields.py`\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
