"""What a request says of a piece, and which settings of a kernel hold windows back."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xpyd_sidecar.transport.tcp import sockets
from xpyd_sidecar.transport.tcp.places import place_of


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 30), st.integers(0, 1 << 30), st.integers(1, 40))
def test_a_piece_is_a_begin_and_stretches_equally_far_apart(begin: int, size: int, gap: int, count: int) -> None:
    step = size + gap
    stretches = [(begin + nth * step, size) for nth in range(count)]
    assert struct.unpack("<QQQII", place_of(stretches)) == (begin, size, step if count > 1 else 0, count, 0)


@pytest.mark.parametrize("stretches", [[(0, 10), (20, 11)], [(0, 10), (20, 10), (41, 10)], [(0, 10), (20, 10), (40, 9)]])
def test_what_is_no_comb_is_refused(stretches: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="no comb"):
        place_of(stretches)


def settings(folder: Path, **given: str) -> list[str]:
    for name, value in given.items():
        (folder / name).write_text(value + "\n")
    return sockets.limits(folder)


def test_windows_that_are_held_back_are_said_with_what_holds_them(tmp_path: Path) -> None:
    assert settings(tmp_path) == [], "what cannot be read holds nothing back"
    assert settings(tmp_path, tcp_rmem="4096\t131072\t6291456", tcp_wmem="4096 16384 4194304", tcp_moderate_rcvbuf="1",
                    tcp_window_scaling="1") == []
    assert settings(tmp_path, tcp_rmem="4096 87380 212992", tcp_wmem="4096 16384 65536", tcp_moderate_rcvbuf="0",
                    tcp_window_scaling="0") == [
        "net.ipv4.tcp_rmem allows 212992 bytes of a connection", "net.ipv4.tcp_wmem allows 65536 bytes of a connection",
        "net.ipv4.tcp_moderate_rcvbuf is off", "net.ipv4.tcp_window_scaling is off"]
    assert settings(tmp_path, tcp_rmem="4096", tcp_wmem="a b c", tcp_moderate_rcvbuf="", tcp_window_scaling="1") == []


def test_they_are_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sockets, "limits", lambda: ["net.ipv4.tcp_rmem allows 212992 bytes of a connection"])
    sockets.complain.cache_clear()
    for _ in range(3):
        sockets.complain()
    assert caplog.text.count("tcp_rmem allows 212992") == 1
    assert "4194304 bytes, or more, are right" in caplog.text
    sockets.complain.cache_clear()
