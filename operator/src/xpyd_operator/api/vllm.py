"""What engines of one version of vLLM would make nothing of: warnings, since an image may have another version.

A document is followed all the same. What our rendering cannot make right, whatever the engine, is refused elsewhere
(``rules_*``, ``render.unsupported``). A test holds the table against vLLM's parser and configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from xpyd_operator.api import options, speculation
from xpyd_operator.api.arguments import GivenOption, ends_with_option, given_options, surplus
from xpyd_operator.api.model import EnvVar
from xpyd_operator.api.service import DisaggService
from xpyd_operator.api.source import Bucket
from xpyd_operator.errors import Fault

VERSION: Final = "vLLM 0.32"
"""What the warnings hold for."""

_SLEEPS = "ends at its start: blocks would lose their memory while peers may still write into them; leave it out"
_POOLS = "serves no completions, so there is nothing to hand from prefill to decode; leave it out"


def _any(_: str) -> bool:
    return True


def _pools(value: str) -> bool:
    return value == "pooling"


def _converts(value: str) -> bool:
    return value not in ("auto", "none")


_TABLE: Final[Mapping[str, tuple[Callable[[str], bool], str]]] = {
    "--tokens|-only": (_any, "has no tokenizer, so no chat or completion with text is answered; write --enable-scale-out"),
    "--ru|nner": (_pools, _POOLS),
    "--conv|ert": (_converts, _POOLS),
    "--enable-sl|eep-mode": (_any, _SLEEPS),
    "--enable-r|eturn-routed-experts": (_any, "gives none of the rows that prefill computed; leave it out"),
}
"""By option: for which values, and why. What stands before the bar is enough for vLLM to know the option."""
_HEADS = {option.partition("|")[0]: (option.replace("|", ""), *entry) for option, entry in _TABLE.items()}
_CHOICE, _CALLS = "--enable-auto-tool-choice", "--tool-call-parser"
_CUMEM: Final = ("--enable-cumem-allocator", "--enable-sleep-mode")
_NO_CACHE: Final = "--no-enable-pref"
_FROM_BUCKETS: Final = ("auto", "runai_streamer", "runai_streamer_sharded", "modelexpress")
"""Loaders that read an object store; ``auto`` becomes the first of them."""
_ALLOCATOR: Final = "PYTORCH_CUDA_ALLOC_CONF"
_EQUAL: Final[Mapping[str, Mapping[str, str]]] = {
    "--block-size": {},
    "--dtype": {"half": "float16", "float": "float32"},
    "--kv-cache-dtype": {"fp8": "fp8_e4m3"},
}
"""Options whose literal values make the KV of a role what it is, with second names of values."""


def warnings(service: DisaggService) -> list[Fault]:
    """What the engines of a service would refuse or not do, each with the version that this holds for."""
    found = [*_options(service), *_models(service), *_loaders(service), *_tools(service), *_allocator(service),
             *_unequal(service), *_uncached(service), *speculation.warnings(service)]
    known = [Fault(path, f"{message} ({VERSION})") for path, message in found]
    told = {fault.path for fault in known}
    return [*known, *(fault for fault in _parsed(service) if fault.path not in told)]


def _parsed(service: DisaggService) -> Iterator[Fault]:
    """What its parser refuses."""
    for path, args in _lists(service):
        for index, message in options.faults(args, service.spec.engine.image, ends=path != "spec.engine.args"):
            yield Fault(f"{path}[{index}]", message)


def full_option_name(name: str) -> str:
    """Full name of the option of the table that ``name`` stands for, shortened or not; empty where it is another one."""
    found = _entry(name)
    return found[0] if found else ""


def _entry(name: str) -> tuple[str, Callable[[str], bool], str] | None:
    for head, entry in _HEADS.items():
        full = entry[0]
        if name == full or (full.startswith("--") and name.startswith(head) and (full == head or full.startswith(name))):
            return entry
    return None


def _lists(service: DisaggService) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every list of arguments with its path."""
    yield "spec.engine.args", service.spec.engine.args
    if service.spec.prefill.max_instances:
        yield "spec.prefill.args", service.spec.prefill.args
    yield "spec.decode.args", service.spec.decode.args


def _options(service: DisaggService) -> Iterator[tuple[str, str]]:
    for path, args in _lists(service):
        for one in given_options(args):
            entry = _entry(one.name)
            if entry is not None and entry[1](one.values[0] if one.values else ""):
                yield f"{path}[{one.index}]", f"{_shown(one)}: an engine with it {entry[2]}"


def _shown(one: GivenOption) -> str:
    """With its value where that is a short word."""
    return " ".join((one.name, *(value for value in one.values[:1] if value.isalnum())))


def _models(service: DisaggService) -> Iterator[tuple[str, str]]:
    for path, args in _lists(service):
        common = service.spec.engine.args
        open_end = path != "spec.engine.args" and ends_with_option(common)
        for index in surplus(args):
            if index or not open_end:
                words = "belongs to no option, so it is a second model; an engine serves the one of spec.model.source"
                yield f"{path}[{index}]", f"{args[index]} {words}"


def _loaders(service: DisaggService) -> Iterator[tuple[str, str]]:
    """Warn of a source in a bucket with a `--load-format` that reads none."""
    origin = service.spec.model.origin
    if not isinstance(origin, Bucket):
        return
    for path, args in _lists(service):
        for one in given_options(args):
            if one.name == "--load-format" and one.values and one.values[0] not in _FROM_BUCKETS:
                words = f"reads no {origin.url}; write {' or '.join(_FROM_BUCKETS[1:])}, or leave it out"
                yield f"{path}[{one.index}]", f"{one.name} {one.values[0]}: an engine with it {words}"


def _tools(service: DisaggService) -> Iterator[tuple[str, str]]:
    """Of each role, as its engine has both lists."""
    names = {path: {one.name: one.index for one in given_options(args)} for path, args in _lists(service)}
    common = names.pop("spec.engine.args")
    told = set()
    for path, own in names.items():
        if _CALLS in own or _CALLS in common or _CHOICE not in (own | common):
            continue
        where = f"{path}[{own[_CHOICE]}]" if _CHOICE in own else f"spec.engine.args[{common[_CHOICE]}]"
        if where not in told:
            told.add(where)
            yield where, f"{_CHOICE}: an engine with it ends at its start unless {_CALLS} is given, too"


def _allocator(service: DisaggService) -> Iterator[tuple[str, str]]:
    for index, variable in enumerate(service.spec.engine.env):
        if variable.name == _ALLOCATOR and "expandable_segments:True" in (variable.value or "") and not _cumem(service):
            words = "with expandable_segments:True an engine ends at its start, as KV to hand over must stay in place"
            yield _env_path(index, variable), f"{words}; leave it out"


def _uncached(service: DisaggService) -> Iterator[tuple[str, str]]:
    """What is offloaded is found by the hashes of the prefix cache."""
    for path, args in _lists(service) if service.spec.kv.offload is not None else ():
        for one in given_options(args):
            if one.name.startswith(_NO_CACHE) and "--no-enable-prefix-caching".startswith(one.name):
                words = f"{one.name}: an engine with it finds nothing of spec.kv.offload again; leave one of them out"
                yield f"{path}[{one.index}]", words


def _env_path(index: int, variable: EnvVar) -> str:
    return f"spec.engine.env[{index}].{'value' if variable.value is not None else 'name'}"


def _cumem(service: DisaggService) -> bool:
    return any(one.name in _CUMEM for _, args in _lists(service) for one in given_options(args))


def _unequal(service: DisaggService) -> Iterator[tuple[str, str]]:
    spec = service.spec
    if not spec.prefill.max_instances:
        return
    common = _literal(spec.engine.args)
    own = {"prefill": _literal(spec.prefill.args), "decode": _literal(spec.decode.args)}
    for option, names in _EQUAL.items():
        values = {role: mine.get(option, common.get(option)) for role, mine in own.items()}
        prefill, decode = values["prefill"], values["decode"]
        if prefill is None or decode is None or "auto" in (prefill[1], decode[1]):
            continue
        if names.get(prefill[1], prefill[1]) != names.get(decode[1], decode[1]):
            role = "decode" if option in own["decode"] else "prefill"
            words = f"{option} is {prefill[1]} for prefill and {decode[1]} for decode, so they take no KV from each other"
            yield f"spec.{role}.args[{own[role][option][0]}]", f"{words}; write it in spec.engine.args"


def _literal(args: tuple[str, ...]) -> dict[str, tuple[int, str]]:
    """Index and value of those options; of one that is repeated the last one counts."""
    return {one.name: (one.index, one.values[0]) for one in given_options(args) if one.name in _EQUAL and one.values}
