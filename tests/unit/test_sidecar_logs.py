"""Log lines: one object or one line per event, with the fields that readers filter by."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
from collections.abc import Iterator
from typing import Literal

import pytest

from xpyd_sidecar import logs


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
    logs.tell(logging.getLogger("xpyd.part"), forged, lambda: {"detail": forged})
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
    logs.tell(logger, "ok", lambda: fields)
    one, two = (re.sub(r"\d{4}-[-0-9T:.]+Z", "NOW", line) for line in out.getvalue().splitlines())
    assert one == two
    assert "NOW" in one
    logs.tell(logger, "bare", dict)
    assert "bare" in out.getvalue().splitlines()[2]
    for number in range(3 * logs.MAX_KNOWN):
        logs.tell(logger, f"another {number}", lambda: fields)
    assert all(f"another {number}" in line for number, line in enumerate(out.getvalue().splitlines()[3:]))
    before = len(out.getvalue().splitlines())
    logging.getLogger().setLevel("WARNING")
    logs.tell(logger, "ok", lambda: fields)
    assert len(out.getvalue().splitlines()) == before, "the level counts"


class Paper(io.StringIO):
    """Says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = asyncio.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)

    def messages(self) -> list[str]:
        """Those of the tests: a thread of another one may still have something to say."""
        lines = [json.loads(line) for line in self.getvalue().splitlines()]
        return [line["message"] for line in lines if line["logger"].startswith("xpyd")]


async def test_lines_without_a_record_leave_together_in_time_in_order_and_with_the_next_record() -> None:
    out = Paper()
    logs.configure("info", "json", out, service="test")
    logger = logging.getLogger("xpyd.part")
    for number in range(3):
        logs.tell(logger, f"line {number}", dict)
    assert out.messages() == []
    await asyncio.wait_for(out.written.wait(), 20)
    logs.tell(logger, "line 3", dict)
    logger.info("line 4")
    for number in range(5, 5 + logs.MOST_LINES):
        logs.tell(logger, f"line {number}", dict)
    assert out.messages() == [f"line {number}" for number in range(5 + logs.MOST_LINES)], "nobody waits for a full batch"
    logs.tell(logger, "the last", dict)
    logging.getLogger().handlers[0].flush()
    assert out.messages()[-1] == "the last"


def test_a_line_that_a_loop_did_not_write_any_more_is_written_by_the_next() -> None:
    out = Paper()
    logs.configure("info", "json", out, service="test")
    logger = logging.getLogger("xpyd.part")

    async def tell(message: str, *, wait: bool) -> None:
        logs.tell(logger, message, dict)
        if wait:
            await asyncio.wait_for(out.written.wait(), 20)

    asyncio.run(tell("one", wait=False))
    asyncio.run(tell("two", wait=True))
    assert out.messages() == ["one", "two"]


def test_a_line_whose_fields_cannot_be_made_says_so_and_the_others_leave() -> None:
    out = io.StringIO()
    logs.configure("info", "json", out, service="test")
    logs.tell(logging.getLogger("xpyd.part"), "bad", lambda: {"a": 1 // 0})
    logs.tell(logging.getLogger("xpyd.part"), "good", lambda: {"a": 1})
    bad, good = map(json.loads, out.getvalue().splitlines())
    assert (bad["message"], good["message"], good["a"]) == ("bad", "good", 1)
    assert "division" in bad["exception"]
