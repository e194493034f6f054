"""Hypothesis strategies for the API: objects made from the structs' own type information, and values that fit nowhere."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from xpyd_operator.api.durations import seconds

_TEXT = {
    "duration": ["1s", "90s", "5m", "1h30m", "1.5s", "500ms", "10ms", "59m"],
    "size": ["1", "0.25Gi", "500M", "2Gi", "1.5Gi"],
    "count": ["0%", "10%", "250%"],
    "part": ["0%", "25%", "100%"],
    "quantity": ["2", "500m", "16Gi", "1e3", "0.5"],
    "source": ["Qwen/Qwen3-8B", "gpt2", "/models/x", "pvc://claim/a/b", "../weights", "./w"],
    "adapter": ["sql", "team/legal", "Qwen/Qwen3-8B", "a"],
    "adapterSource": ["/adapters/sql", "org/sql-lora", "./sql"],
    "name": ["a", "hub-cache", "x.y"],
    "service": ["a", "qwen-3"],
    "key": ["token", "a.b_C"],
    "env": ["HF_HUB_OFFLINE", "A"],
    "path": ["/dev/shm/x"],
    "device": ["none", "nvidia.com/gpu", "amd.com/gpu", "nvidia.com/mig-3g.40gb"],
    "label": ["zone", "topology.kubernetes.io/zone", "nvidia.com/gpu.clique"],
    "host": ["models.home", "10.0.0.7", "[fd00::1]"],
    "origin": ["https://app.example", "http://localhost:3000", "*"],
    "certificate host": ["chat.example.com", "routers"],
    "route host": ["chat.example.com", "*.example.com"],
    "prefix": ["/", "/qwen", "/v1", "/v1/x", "/v1x", "/a/b"],
    "network": ["10.0.0.0/8", "192.168.1.7/32", "fd00::/8", "2001:db8:1::/48"],
    "url": ["http://collector:4318"],
    "class": ["LMCacheMPConnector", "mine.store.Mine", "NixlConnector"],
}
JUNK = st.sampled_from(
    [
        None, True, False, -1, 0, 1, 3, 2048, 10**6, 0.5, -2.5, "", "x", "1", "-1", "Off", "1s", "1 s", "0s", "5m\n", "2Gi",
        "10%", "101%", "é", "a" * 600, [], ["x"], [1], [[]], {}, {"x": 1}, {"name": "a"}, "https://x", "/a:b",
    ]
)  # fmt: skip


def objects(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    """Wire objects that fit the struct; rules across fields may still be broken."""
    return _type(mi.type_info(kind), {})


def _type(kind: mi.Type, extra: dict[str, Any]) -> st.SearchStrategy[Any]:
    match kind:
        case mi.Metadata():
            return _type(kind.type, extra | (kind.extra or {}))
        case mi.UnionType():
            return st.one_of(*(_type(option, extra) for option in kind.types if not isinstance(option, mi.NoneType)))
        case mi.StructType():
            required = {field.encode_name: _type(field.type, {}) for field in kind.fields if field.required}
            optional = {field.encode_name: _type(field.type, {}) for field in kind.fields if not field.required}
            return st.fixed_dictionaries(required, optional=optional)
        case mi.VarTupleType():
            unique = (lambda item: item[extra["merge_key"]]) if "merge_key" in extra else None
            return st.lists(_type(kind.item_type, {}), max_size=2, unique_by=unique)
        case mi.DictType() if extra.get("preserve"):
            return st.sampled_from([{}, {"spec": {"x": [1, None]}}, {"a.b/c": "d"}])
        case mi.DictType():
            keys = st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "a b"])
            return st.dictionaries(keys, _type(kind.value_type, {}), max_size=2)
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            least = kind.ge or 0
            return st.integers(least, min(kind.le or 9, least + 9)) if least < 1024 else st.sampled_from([8000, 9000])
        case mi.FloatType():
            return st.floats(kind.ge, kind.le)
        case mi.StrType():
            plain = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), min_size=1, max_size=12)
            if extra.get("kind") == "duration":
                least, most = seconds(extra["min"]), seconds(extra["max"])
                return st.sampled_from([text for text in _TEXT["duration"] if least <= seconds(text) <= most])
            return st.sampled_from(_TEXT[extra["kind"]]) if "kind" in extra else plain
        case mi.AnyType():
            return st.none() | st.integers() | st.text(max_size=3)
    raise TypeError(kind)


@st.composite
def damaged(draw: st.DrawFn, kind: type[msgspec.Struct]) -> Any:
    """An object with one value anywhere in it replaced, or one field added."""
    made = draw(objects(kind))
    places = list(_places(made))
    section, key = draw(st.sampled_from(places)) if places else (made, "x")
    if isinstance(section, dict) and draw(st.integers(0, 4)) == 0:
        key = draw(st.sampled_from(["xyzzy", "replicas", "name"]))
    section[key] = draw(JUNK)
    return made


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from _places(item)
