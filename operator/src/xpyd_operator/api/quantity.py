"""Kubernetes quantities: ``500m``, ``2``, ``16Gi``, ``1e9``."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][0-9]{1,2})?")
_FACTOR = {suffix: Decimal(1000) ** power for power, suffix in enumerate(("", "k", "M", "G", "T", "P", "E"))}
_FACTOR |= {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)}
_FACTOR["m"] = Decimal("0.001")


def value(quantity: int | str) -> Decimal:
    """The exact value.

    Raises:
        ValueError: it is no quantity, or negative.
    """
    match = _QUANTITY.fullmatch(str(quantity))
    if match is None:
        raise ValueError(f"{quantity!r} is not a quantity; write a number and a unit, e.g. 500m, 2 or 16Gi")
    suffix = match[2] or ""
    if suffix[:1] in ("e", "E") and suffix[1:]:
        return Decimal(match[1]).scaleb(int(suffix[1:])) if suffix[1:].isdecimal() else Decimal(match[1]) * _FACTOR[suffix]
    return Decimal(match[1]) * _FACTOR[suffix]


def size(quantity: int | str) -> int:
    """Bytes, rounded up.

    Raises:
        ValueError: as ``value``.
    """
    return int(value(quantity).to_integral_value(ROUND_CEILING))
