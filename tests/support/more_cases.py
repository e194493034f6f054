"""Cases of a test that ``make test`` leaves out, since others show what they show.

    @pytest.mark.parametrize("seed", [0, 1, *more(range(2, 20))])
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def more(cases: Iterable[Any]) -> list[Any]:
    """The cases, marked ``test_all``. A tuple has a value for each parameter."""
    return [pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=pytest.mark.test_all) for one in cases]
