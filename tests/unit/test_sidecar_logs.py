"""Log lines: one object or one line per event, with the fields that readers filter by."""

from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Iterator
from typing import Literal

import pytest

from xpyd_sidecar.process import logs


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before


def test_json_lines_carry_process_fields_extra_and_exception() -> None:
    out = io.StringIO()
    logs.configure("info", "json", out, service="test", instance="test-e0")
    try:
        int("no number")
    except ValueError:
        logging.getLogger("xpyd.part").exception("lost %s", "it", extra={"transfer": "ab", "peer": object, "level": "mine"})
    logging.getLogger("xpyd.part").debug("not shown")
    [line] = out.getvalue().splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"], record["message"]) == ("error", "xpyd.part", "lost it")
    assert (record["service"], record["instance"], record["transfer"]) == ("test", "test-e0", "ab")
    assert record["time"].endswith("Z")
    assert "ValueError: invalid literal" in record["exception"]


def test_text_lines_are_one_line_with_values_at_the_end() -> None:
    out = io.StringIO()
    logs.configure("debug", "text", out, instance="test-e0")
    logging.getLogger("xpyd.part").debug("pushed", extra={"bytes": 3})
    assert out.getvalue().endswith("Z DEBUG   test-e0 xpyd.part: pushed bytes=3\n")


FORGED = "x\n2026-01-01T00:00:00.000Z INFO    r0 xpyd_sidecar.access: ok status=200"
class Said:
    """Lines that say a message with fields."""

    def message(self, one: tuple[str, dict[str, object]]) -> str:
        return one[0]

    def timestamp(self, _: object) -> float:
        return time.time()

    def fields(self, one: tuple[str, dict[str, object]]) -> dict[str, object]:
        return one[1]

    def json(self, one: tuple[str, dict[str, object]]) -> str:
        return json.dumps(one[1], separators=(",", ":"))[1:-1]


ENDS = ("\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")


@pytest.mark.parametrize("end", ENDS, ids=[end.encode("unicode_escape").decode() for end in ENDS])
def test_nothing_that_is_said_makes_a_line_of_text_of_its_own(end: str) -> None:
    forged = FORGED.replace("\n", end)
    out = io.StringIO()
    logs.configure("info", "text", out, instance=f"r0{forged}")
    logger = logging.getLogger(f"xpyd.part{forged}")
    logger.info("failed: %s", forged, extra={"detail": forged, f"name{forged}": forged})
    try:
        int(forged)
    except ValueError as error:
        error.args = (forged,)
        logger.exception("lost %s", forged)
    logs.tell_all(logging.getLogger("xpyd.part"), [(forged, {"detail": forged})], Said())
    written = out.getvalue()
    assert len([line for line in written.splitlines() if not line.startswith("  ")]) == 3
    assert len(written.splitlines()) == written.count("\n"), "no other line ends"
    assert "ValueError: x" in written
    assert end.encode("unicode_escape").decode() in written, "it can still be read"


def test_text_that_is_printable_is_written_as_it_is_and_control_characters_are_not() -> None:
    out = io.StringIO()
    logs.configure("info", "text", out)
    logging.getLogger("x").info("größe 日本 \x1b[31mred\x00\x7f\t\u202e \udcff")
    assert out.getvalue().endswith("x: größe 日本 \\x1b[31mred\\x00\\x7f\\t\\u202e \\udcff\n")


def test_configuring_again_replaces_the_handler() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure("info", "text", first)
    logs.configure("info", "text", second)
    logging.getLogger("x").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.mark.parametrize("style", ["json", "text"])
def test_what_is_told_without_a_record_reads_as_any_other_line(style: Literal["json", "text"]) -> None:
    out = io.StringIO()
    logs.configure("info", style, out, service="test", instance="test-e0")
    logger, fields = logging.getLogger("xpyd.part"), {"transfer": "ab", "first_byte_s": None, "seconds": 0.25}
    logger.info("%s", "ok", extra=fields)
    logs.tell_all(logger, [("ok", fields)], Said())
    one, two = (re.sub(r"\d{4}-[-0-9T:.]+Z", "NOW", line) for line in out.getvalue().splitlines())
    assert one == two
    assert "NOW" in one
    logs.tell_all(logger, [(f"another {number}", fields) for number in range(3 * logs.MAX_KNOWN)], Said())
    assert all(f"another {number}" in line for number, line in enumerate(out.getvalue().splitlines()[2:]))
    before = len(out.getvalue().splitlines())
    logging.getLogger().setLevel("WARNING")
    logs.tell_all(logger, [("ok", fields)], Said())
    assert len(out.getvalue().splitlines()) == before, "the level counts"


def test_a_line_whose_fields_cannot_be_made_says_so_and_the_others_leave() -> None:
    out = io.StringIO()
    logs.configure("info", "json", out, service="test")
    logs.tell_all(logging.getLogger("xpyd.part"), [("bad", {"a": object()}), ("good", {"a": 1})], Said())
    bad, good = map(json.loads, out.getvalue().splitlines())
    assert (bad["message"], good["message"], good["a"]) == ("a line could not be made", "good", 1)
    assert "object" in bad["exception"]
