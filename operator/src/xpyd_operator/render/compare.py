"""Whether an object in the cluster is as it was applied.

    maps        what others added is left alone, except in selectors: an added label there would change whom they mean
    lists       items with a ``name`` (``mountPath`` for mounts, ``uid`` for owners) are found by it, and what others added
                is left alone; other lists are equal item by item
    quantities  ``1000m`` and ``1`` are one value
    numbers     an int-or-string may come back as either
    emptiness   ``""``, ``{}``, ``[]``, ``false`` and a field that is not there are one

``dropped_path`` asks less: whether the API server took all of an object.
"""

from __future__ import annotations

from typing import Any

from xpyd_operator.api.quantity import value

_EXACT = frozenset({"selector", "podSelector", "namespaceSelector"})
_QUANTITIES = frozenset({"limits", "requests", "sizeLimit"})
_KEYS = ("name", "mountPath", "uid")


def differs(wanted: Any, live: Any) -> str:
    """Path of the first thing that we set and that is not so; empty where all is as wanted."""
    return _differs(wanted, live, "", exact=False, quantity=False) or ""


def dropped_path(wanted: Any, live: Any) -> str:
    """Path of the first thing that we set and that is not there at all; empty where there is none.

    What has another value is there. Of lists without keys only their length tells that something was left out.
    """
    return _dropped(wanted, live, "") or ""


def _dropped(wanted: Any, live: Any, path: str) -> str | None:
    if _says_nothing(wanted):
        return None
    if _empty(live):
        return path or "document"
    if isinstance(wanted, dict) and isinstance(live, dict):
        pairs = [(f"{path}.{key}" if path else key, one, live.get(key)) for key, one in wanted.items()]
    elif isinstance(wanted, list | tuple) and isinstance(live, list):
        key = next((key for key in _KEYS[::-1] if _tells(wanted, key) and _keyed(live, key)), None)
        if key is None:
            return path if len(live) < len(wanted) else None
        there = {item[key]: item for item in live}
        pairs = [(f"{path}[{item[key]}]", item, there.get(item[key])) for item in wanted]
    else:
        return None
    return next((found for where, one, other in pairs if (found := _dropped(one, other, where))), None)


def _says_nothing(one: Any) -> bool:
    """Whether the API server may leave it out of what it shows: it is empty, or 0, as all that is in it."""
    inner = one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
    return (_empty(one) or one == 0) if not inner else all(_says_nothing(each) for each in inner)


def _tells(items: list[Any] | tuple[Any, ...], key: str) -> bool:
    """Whether no two items have the same value of this key."""
    return _keyed(items, key) and len({item[key] for item in items}) == len(items)


def _differs(wanted: Any, live: Any, path: str, *, exact: bool, quantity: bool) -> str | None:
    if _empty(wanted) and _empty(live):
        return None
    if isinstance(wanted, dict) and isinstance(live, dict):
        return _map(wanted, live, path, exact=exact, quantity=quantity)
    if isinstance(wanted, list | tuple) and isinstance(live, list):
        return _list(wanted, live, path, exact=exact)
    same = _same_quantity(wanted, live) if quantity else _same(wanted, live)
    return None if same else path or "document"


def _map(wanted: dict[str, Any], live: dict[str, Any], path: str, *, exact: bool, quantity: bool) -> str | None:
    for key, one in wanted.items():
        here = f"{path}.{key}" if path else key
        inner = {"exact": exact or key in _EXACT, "quantity": quantity or key in _QUANTITIES}
        if found := _differs(one, live.get(key), here, **inner):
            return found
    added = next((key for key, one in live.items() if key not in wanted and not _empty(one)), None)
    return f"{path}.{added}" if exact and added is not None else None


def _list(wanted: list[Any] | tuple[Any, ...], live: list[Any], path: str, *, exact: bool) -> str | None:
    key = next((key for key in _KEYS if _tells(wanted, key) and _keyed(live, key)), None)
    if key is None or exact:
        if len(wanted) != len(live):
            return path
        pairs = [(str(index), one, other) for index, (one, other) in enumerate(zip(wanted, live, strict=True))]
    else:
        there = {item[key]: item for item in live}
        pairs = [(str(item[key]), item, there.get(item[key])) for item in wanted]
    for name, one, other in pairs:
        if found := _differs(one, other, f"{path}[{name}]", exact=exact, quantity=False):
            return found
    return None


def _keyed(items: Any, key: str) -> bool:
    return bool(items) and all(isinstance(item, dict) and key in item for item in items)


def _empty(one: Any) -> bool:
    return one is None or one is False or (isinstance(one, str | dict | list | tuple) and not one)


def _same(wanted: Any, live: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(live, bool):
        return wanted is live
    if isinstance(wanted, int | str) and isinstance(live, int | str):
        return str(wanted) == str(live)
    return bool(wanted == live)


def _same_quantity(wanted: Any, live: Any) -> bool:
    if not isinstance(wanted, int | str) or not isinstance(live, int | str):
        return False
    try:
        return value(wanted) == value(live)
    except ValueError:  # units finer than ours: as text
        return str(wanted) == str(live)
