"""What each role speculates with, as its arguments say, and what comes of it between the two.

The rule is the engines' (``xpyd_sidecar.kv.peers``): without the same draft on prefill, decode accepts few drafts,
and KV of a model with states is not handed over at all. Documents do not say whether a model has states, so nothing is
refused here: what surely costs something is a warning, what matters for such models alone is a note. Values that cannot be
read (a variable) are left to the engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from xpyd_operator.api.arguments import is_option
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import Fault

Words = tuple[str, str]
"""A path and what is said of it."""

WHOLE: Final = ("--speculative-config", "-sc")
_NUMBER: Final = "num_speculative_tokens"
FIELDS: Final[Mapping[str, str]] = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": _NUMBER}
_NOTHING: Final = ("", "None")
_HEADS: Final = {
    "--specu": WHOLE[0], "--spec-me": "--spec-method", "--spec-mo": "--spec-model", "--spec-t": "--spec-tokens",
}
"""What is enough for vLLM to know an option."""
MODELS: Final = frozenset({"draft_model", "eagle", "eagle3", "mtp"})
"""Methods with a model that drafts, and KV of its own; ``..._mtp`` is ``mtp``, too."""
OTHERS: Final = frozenset({"custom_class", "dflash", "dspark", "extract_hidden_states", "medusa", "mlp_speculator"})
"""Methods that xpyd's connector refuses."""
_ALIKE: Final = ("method", "model", "revision", "kv_cache_dtype", "parallel_drafting")
_NOT_HANDED: Final = "so the draft's KV is not handed over and decode accepts few drafts; write it in spec.engine.args"
_STATES: Final = "where the model has states (Mamba, gated delta nets), prefill's KV is refused"


class RoleDraft(msgspec.Struct, frozen=True):
    """What one role speculates with."""

    path: str = ""
    """Where it is said; empty: nowhere."""
    fields: dict[str, Any] | None = {}
    """As vLLM reads them; None where they cannot be read."""

    @property
    def method(self) -> str:
        """Empty where it is not said, or left to vLLM to find out."""
        named = str((self.fields or {}).get("method") or "")
        return "mtp" if named.endswith("_mtp") else named

    @property
    def by_model(self) -> bool:
        """Surely with a model that drafts."""
        return self.method in MODELS or (not self.method and bool((self.fields or {}).get("model")))


def option(name: str) -> str:
    """The option that a name is, shortened or not; empty where it is none of speculation."""
    if name in WHOLE:
        return name
    for head, full in _HEADS.items():
        if name.startswith(head) and full.startswith(name):
            return full
    return ""


def warnings(service: DisaggService) -> Iterator[Words]:
    """What engines would not start with, and what costs time or acceptance."""
    yield from _unreadable(service)
    prefill, decode = _roles(service)
    for path, method in {role.path: role.method for role in (prefill, decode) if role.method in OTHERS}.items():
        yield path, f"an engine that drafts by {method} ends at its start, as xpyd's connector does not know that method"
    if not service.spec.prefill.max_instances or not _known(prefill, decode):
        return
    if decode.by_model and not prefill.path:
        yield decode.path, f"prefill does not draft, {_NOT_HANDED}"
    elif prefill.path and not decode.path:
        yield prefill.path, "prefill makes one token, so its drafts are for nothing unless decode drafts alike"
    elif (decode.by_model or prefill.by_model) and (name := _difference(prefill, decode)):
        here, there = _shown(prefill, name), _shown(decode, name)
        yield _own(prefill, decode), f"{name} is {here} for prefill and {there} for decode, {_NOT_HANDED}"


def notes(service: DisaggService) -> list[Fault]:
    """What matters for models with states alone."""
    if not service.spec.prefill.max_instances:
        return []
    prefill, decode = _roles(service)
    if not _known(prefill, decode) or prefill.path == decode.path:
        return []
    if not prefill.path or not decode.path:
        one = decode if decode.path else prefill
        return [Fault(one.path, f"one role speculates and the other does not: {_STATES}")]
    name = next((name for name in (*_ALIKE, _NUMBER) if _value(prefill, name) != _value(decode, name)), "")
    if not name:
        return []
    words = f"{name} is {_shown(prefill, name)} for prefill and {_shown(decode, name)} for decode: {_STATES}"
    return [Fault(_own(prefill, decode), words)]


def _roles(service: DisaggService) -> tuple[RoleDraft, RoleDraft]:
    spec = service.spec
    common = [(f"spec.engine.args[{index}]", value) for index, value in enumerate(spec.engine.args)]
    prefill = [(f"spec.prefill.args[{index}]", value) for index, value in enumerate(spec.prefill.args)]
    decode = [(f"spec.decode.args[{index}]", value) for index, value in enumerate(spec.decode.args)]
    return read([*common, *prefill]) if spec.prefill.max_instances else RoleDraft(), read([*common, *decode])


def read(args: Sequence[tuple[str, str]]) -> RoleDraft:
    """What an engine with these arguments (each with its path) speculates with, as vLLM's parser puts it together.

    Of objects the last one counts; fields behind dots are one object, which comes after all of them; the short options add
    to what is there.
    """
    path = ""
    whole: dict[str, Any] = {}
    added: dict[str, Any] = {}
    dotted: dict[str, dict[str, Any]] = {}
    for name, field, value, at in _given(args):
        path = at
        if value is None:
            return RoleDraft(at, None)
        if field:
            dotted.setdefault(name, {})[field] = _json(value, value)
        elif name in FIELDS:
            added[FIELDS[name]] = _json(value, value) if name == "--spec-tokens" else value
        elif value in _NOTHING:
            whole = {}
        elif isinstance(found := _json(value, None), dict):
            whole = {key.replace("-", "_"): each for key, each in found.items()}
        else:
            return RoleDraft(at, None)
    for each in dotted.values():
        whole = {key.replace("-", "_"): value for key, value in each.items()}
    fields = {**whole, **added}
    return RoleDraft(path if fields else "", fields)


def _given(args: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, str | None, str]]:
    """Each option of speculation: its name, the field behind a dot, its value (None: it has none), and its path."""
    for index, (path, argument) in enumerate(args):
        name, joined, value = argument.partition("=")
        name, _, field = name.partition(".")
        if not is_option(name) or not (known := option(name.replace("_", "-"))):
            continue
        if joined:
            yield known, field, value, path
        elif index + 1 < len(args) and not is_option(args[index + 1][1]):
            yield known, field, args[index + 1][1], path
        else:
            yield known, field, None, path


def _json(text: str | None, otherwise: Any) -> Any:
    try:
        return msgspec.json.decode((text or "").encode())
    except msgspec.DecodeError:
        return otherwise


def _unreadable(service: DisaggService) -> Iterator[Words]:
    spec = service.spec
    lists = [("spec.engine.args", spec.engine.args), ("spec.decode.args", spec.decode.args)]
    if spec.prefill.max_instances:
        lists.insert(1, ("spec.prefill.args", spec.prefill.args))
    for path, args in lists:
        for name, field, value, at in _given([(f"{path}[{index}]", one) for index, one in enumerate(args)]):
            literal = name in WHOLE and not field and value is not None and "$(" not in value
            if literal and value not in _NOTHING and not isinstance(_json(value, None), dict):
                yield at, f"{name}: an engine with it ends at its start, as its value is no JSON object"


def _known(*roles: RoleDraft) -> bool:
    """Whether all that is said can be read, and is something that the connector takes."""
    return all(role.fields is not None and role.method not in OTHERS for role in roles)


def _difference(prefill: RoleDraft, decode: RoleDraft) -> str:
    """The first field that a draft's KV depends on and that differs; one that is left to vLLM on a side may be the same."""
    for name in _ALIKE:
        here, there = _value(prefill, name), _value(decode, name)
        if here != there and not (name == "method" and "" in (here, there) and prefill.by_model and decode.by_model):
            return name
    return ""


def _value(role: RoleDraft, name: str) -> Any:
    if name == "method":
        return role.method
    value = (role.fields or {}).get(name)
    return "fp8_e4m3" if (name, value) == ("kv_cache_dtype", "fp8") else value  # vLLM's two names of one type


def _shown(role: RoleDraft, name: str) -> str:
    value = _value(role, name)
    return "not set" if value in (None, "") else str(value)


def _own(prefill: RoleDraft, decode: RoleDraft) -> str:
    """The path of the role that says something of its own."""
    return prefill.path if prefill.path.startswith("spec.prefill") else decode.path
