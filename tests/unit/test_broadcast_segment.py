"""Sealed memory without a name."""

from __future__ import annotations

import os

import pytest

from xpyd_sidecar.broadcast.segment import Segment
from xpyd_sidecar.errors import OurFault


def test_two_mappings_of_a_segment_show_the_same_bytes() -> None:
    one = Segment.create("test", 8192)
    two = Segment(os.dup(one.fd))
    assert two.size == 8192
    one.bytes[5000:5003] = b"abc"
    assert bytes(two.bytes[5000:5003]) == b"abc"
    one.words(4)[3] = 7
    assert two.words(4)[3] == 7
    one.close()
    assert bytes(two.bytes[5000:5003]) == b"abc"
    two.close()


def test_nobody_can_change_its_size_which_would_make_reads_fail_with_sigbus() -> None:
    segment = Segment.create("test", 8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.fd, size)
    segment.close()


def test_memory_that_is_not_sealed_is_refused_and_its_descriptor_closed() -> None:
    bare = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(bare, 4096)
    with pytest.raises(ValueError, match="not sealed"):
        Segment(bare)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(bare)


def test_a_view_that_a_caller_holds_stays_readable_after_close() -> None:
    segment = Segment.create("test", 4096)
    segment.bytes[:3] = b"abc"
    view = segment.bytes[:3]
    segment.close()
    assert bytes(view) == b"abc"
    with pytest.raises(OurFault, match="closed twice"):
        segment.close()
