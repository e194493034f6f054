"""Tests of what is known to be wrong: each says what is right, and fails until its row is mended.

    @fails("A3", "a copy that is complete later is looked at again at the next tick")
    def test_…

The rows are those of docs/development/late-copies.md, which lists every such test; ``tests/workshop/test_late_list.py``
compares the two. A test that passes all the same is an error: then its row is mended, and the mark goes.
"""

from __future__ import annotations

import pytest


def fails(row: str, why: str, raises: type[BaseException] = AssertionError) -> pytest.MarkDecorator:
    """Marks a test, or a parameter, that fails with ``raises`` and nothing else."""
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"{row}: {why}")
