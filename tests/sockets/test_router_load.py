"""A mixed load of 8 seconds at half of what is possible: nothing fails, and the router's memory stays what it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from load import LEAST, mixed_load


@pytest.mark.unsanitized
@pytest.mark.test_all
@pytest.mark.timeout(120)
async def test_under_a_mixed_load_nothing_fails_and_memory_is_flat(tmp_path: Path) -> None:
    report = await mixed_load(tmp_path, seconds=8.0)
    print(report.told())
    report.check()
    assert report.requests >= LEAST
    assert len(report.kinds) == 7
