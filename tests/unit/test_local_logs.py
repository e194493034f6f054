from __future__ import annotations

from pathlib import Path

from xpyd_operator.local.logs import Follower, bound, tail


def test_a_log_is_cut_at_its_limit_and_its_end_kept(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    with open(log, "ab", buffering=0) as writer:
        writer.write(b"x" * 50 + b"end of it\n")
        assert not bound(log, limit=60, keep=10)
        writer.write(b"y")
        assert bound(log, limit=60, keep=11)
        writer.write(b"goes on\n")
    assert log.read_bytes() == b"goes on\n", "a writer that appends goes on at the new end"
    assert (tmp_path / "engine.log.1").read_bytes() == b"end of it\ny"
    assert not bound(tmp_path / "none.log")


def test_tail(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log, 5) == []
    log.write_text("".join(f"line {i} {'x' * 100}\n" for i in range(5000)))
    assert [line.split()[1] for line in tail(log, 3)] == ["4997", "4998", "4999"]
    assert len(tail(log, 10_000)) == 5000
    assert tail(log, 0) == []


def test_tail_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\xfe\nok")
    assert tail(log, 1) == ["ok"]


def test_a_follower_sees_whole_lines_and_survives_cuts_and_new_files(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("old\n")
    late, early = Follower(log, from_end=True), Follower(log, from_end=False)
    with open(log, "a") as writer:
        writer.write("new\nhal")
    assert late.read() == ["new"]
    assert early.read() == ["old", "new"]
    with open(log, "a") as writer:
        writer.write("f\n")
    assert late.read() == ["half"]
    log.write_text("cut\n")
    assert late.read() == ["cut"]
    log.unlink()
    assert late.read() == []
    log.write_text("another file\n")
    assert late.read() == ["another file"]


def test_a_follower_does_not_hoard_a_line_without_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"z" * (3 << 20))
    follower = Follower(log, from_end=False)
    assert sum(len(line) for _ in range(4) for line in follower.read()) >= 1 << 20
