from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.contract.timeline import Span
from xpyd_sidecar.kv.pieces import MOST, Pieces


def test_few_spans_stay_as_they_are() -> None:
    pieces = Pieces()
    for n in range(3):
        pieces.add(n, n + 0.5, 10, "tcp")
    assert pieces.take() == [Span(n, n + 0.5, 10, 1, "tcp") for n in range(3)]


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 10), st.integers(0, 1 << 30), st.sampled_from(["tcp", "arena"])),
                min_size=1, max_size=700))
def test_whatever_comes_is_kept_within_the_bound_and_nothing_is_forgotten(
        came: list[tuple[float, float, int, str]]) -> None:
    pieces = Pieces()
    for at, took, size, link in came:
        pieces.add(at, at + took, size, link)
        assert len(pieces) <= MOST
    kept = pieces.take()
    assert sum(span.size for span in kept) == sum(size for _, _, size, _ in came)
    assert sum(span.count for span in kept) == len(came)
    assert min(span.at for span in kept) == min(at for at, *_ in came)
    assert max(span.until for span in kept) == max(at + took for at, took, *_ in came)


def test_spans_of_two_links_in_one_say_so() -> None:
    pieces = Pieces()
    for n in range(MOST + 1):
        pieces.add(n, n, 1, "tcp" if n % 2 else "arena")
    assert {span.link for span in pieces.take()[:-1]} == {"several"}
