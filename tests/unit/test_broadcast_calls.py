"""Calls and answers as parts of a message."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.broadcast import calls
from xpyd_sidecar.broadcast.calls import Answer, Call, Failure, SeparateBuffer

values = st.recursive(
    st.none() | st.booleans() | st.integers(-2**63, 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12)


@given(st.lists(values, max_size=4).map(tuple), st.dictionaries(st.text(), values, max_size=3),
       st.none() | st.lists(st.text(), max_size=3).map(tuple), st.booleans())
def test_a_call_is_read_as_it_was_made(args: tuple[Any, ...], kwargs: dict[str, Any], to: tuple[str, ...] | None,
                                       answer: bool) -> None:
    call = Call(7, "method", to, answer, args, kwargs)
    parts = calls.pack(call)
    assert len(parts) == 1
    assert calls.unpack([bytes(part) for part in parts], Call) == call


@given(st.lists(st.binary(max_size=50), max_size=8))
def test_buffers_that_are_wrapped_become_parts_and_come_back_as_views_at_their_place(buffers: list[bytes]) -> None:
    parts = calls.pack(Answer(1, {"list": [SeparateBuffer(each) for each in buffers], "n": 5}))
    assert [bytes(part) for part in parts[1:]] == buffers
    assert len(parts[0]) < 60 + 10 * len(buffers)
    answer = calls.unpack([bytes(part) for part in parts], Answer)
    assert [bytes(view) for view in answer.result["list"]] == buffers
    assert answer.result["n"] == 5


def test_failures_are_carried() -> None:
    answer = Answer(3, failure=Failure("KeyError", "'x'", "Traceback …"))
    assert calls.unpack([bytes(part) for part in calls.pack(answer)], Answer) == answer


@given(st.lists(st.binary(max_size=80), max_size=3))
def test_what_is_no_call_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(ValueError, match="not a Call"):
        calls.unpack(parts, Call)


def test_a_buffer_that_is_not_there_and_a_message_of_the_other_kind_are_refused() -> None:
    parts = [bytes(part) for part in calls.pack(Answer(1, [SeparateBuffer(b"x")]))]
    with pytest.raises(ValueError, match="not a Answer: extension 1 with index 0 of 0 parts"):
        calls.unpack(parts[:1], Answer)
    with pytest.raises(ValueError, match="not a Call"):
        calls.unpack(parts, Call)


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="calls do not carry complex; buffers are wrapped in SeparateBuffer"):
        calls.pack(Answer(1, 1j))
