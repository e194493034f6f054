"""Why an engine ended, read from the end of its log: the innermost exception, not those that only tell of it.

vLLM is several processes that write into one log. A worker ends by an exception; the engine core then raises one of its own
("see stack trace for root cause"), and the API server another ("see root cause above"), which is what the log ends with:

    (Worker pid=3) ERROR … Traceback … ValueError: no kernel for this     ◀ the cause
    (EngineCore pid=2) ERROR … Traceback … Exception: WorkerProc initialization failed … root cause
    Traceback … RuntimeError: Engine core initialization failed. See root cause above.

Lines of processes may be mixed. Of one traceback with several exceptions, the first of those that were raised ``from`` each
other is the innermost; one that was raised while another was handled replaces it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec

LONGEST = 300
_PREFIX = re.compile(r"^(?P<who>\([^()]*pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)?)?")
_BEGIN = "Traceback (most recent call last):"
_RAISED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: |:?$)")
_FROM = "The above exception was the direct cause of the following exception:"
_DURING = "During handling of the above exception, another exception occurred:"
_TELLS = re.compile(r"root cause|Engine core initialization failed|EngineDeadError|encountered an issue|SystemExit|"
                    r"Worker ?Proc|died unexpectedly", re.IGNORECASE)
"""Of exceptions that only tell of another one."""
_USAGE = re.compile(r"^\S+\.py: error: (?P<words>.+)$")
"""What argparse ends with."""


class _Process:
    """The traceback that a process is writing."""

    def __init__(self, *, inside: bool) -> None:
        self.inside = inside
        self.chain: list[tuple[str, bool]] = []
        """Exceptions of one traceback, in order: its words, and whether the next one was raised from it."""
        self.more = 0
        """Lines that still belong to the last exception's words."""


class _Found(msgspec.Struct, frozen=True):
    words: str
    tells: bool
    """It only tells of another one."""


def cause(lines: Iterable[str], *, cut: bool = False) -> str:
    """The innermost cause in the lines of a log; empty where there is none. ``cut``: they may begin within a traceback."""
    processes: dict[str, _Process] = {}
    found: list[_Found] = []
    usage = ""
    for line in lines:
        prefix = _PREFIX.match(line)
        who, text = (prefix["who"] or "", line[prefix.end():]) if prefix else ("", line)
        if match := _USAGE.match(text):
            usage = match["words"]
        one = processes.setdefault(who, _Process(inside=cut))
        _read(one, text.rstrip(), found)
    for one in processes.values():
        _close(one, found)
    best = next((each for each in reversed(found) if not each.tells), None)
    words = best.words if best else usage or (found[-1].words if found else "")
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"


def _read(one: _Process, text: str, found: list[_Found]) -> None:
    if text.startswith(_BEGIN):
        if not one.chain or one.chain[-1][0]:
            _close(one, found)
        one.inside = True
    elif text in (_FROM, _DURING):
        if one.chain:
            words, _ = one.chain[-1]
            one.chain[-1] = (words, text == _FROM)
            one.chain.append(("", False))
    elif one.inside and _RAISED.match(text):
        if one.chain and not one.chain[-1][0]:
            one.chain.pop()
        one.chain.append((text, False))
        one.inside = False
        one.more = 1 if "validation error" in text else 0
    elif one.more and text.startswith("  "):
        one.more -= 1
        words, linked = one.chain[-1]
        one.chain[-1] = (f"{words}: {text.strip()}", linked)


def _close(one: _Process, found: list[_Found]) -> None:
    """The traceback is over: of its exceptions, keep the innermost that says something."""
    chain = [each for each in one.chain if each[0]]
    one.chain, one.inside, one.more = [], False, 0
    if not chain:
        return
    best = chain[-1]
    for earlier in reversed(chain[:-1]):
        if not earlier[1] and not _TELLS.search(best[0]):
            break
        best = earlier
    found.append(_Found(best[0].rstrip(":"), bool(_TELLS.search(best[0]))))
