"""How far an engine's start has come, read from its log.

The phrases are vLLM 0.32's. A phrase that another version words differently only makes the display coarser: whether an
engine is ready is never taken from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from xpyd_operator.local.logs import tail
from xpyd_operator.local.units import START_LINE

TAIL_LINES = 400
"""Lines of a log that are looked at: more than a start prints."""


class Progress(msgspec.Struct, frozen=True):
    """How far an engine's start has come by its log: its phase in words, and the last line that looks like an error."""

    phase: str = "starting Python"
    error: str = ""
    """The last line that looks like the reason of a failure."""


_PHASES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"non-default args"), "reading the model's configuration"),
    (re.compile(r"Resolved architecture: (\w+)"), "starting the engine core ({0})"),
    (re.compile(r"Initializing a V1 LLM engine"), "starting the workers"),
    (re.compile(r"Starting to load model"), "loading the model"),
    (re.compile(r"Loading \w+ checkpoint shards: +(\d+)% Completed \| (\d+/\d+)"), "loading weights, {0} % ({1} files)"),
    (re.compile(r"Loading weights took ([\d.]+) seconds"), "weights loaded in {0} s, profiling memory"),
    (re.compile(r"Dynamo bytecode transform|Compiling a graph"), "compiling"),
    (re.compile(r"KV cache size: ([\d,]+) tokens"), "warming up (KV cache of {0} tokens)"),
    (re.compile(r"Capturing CUDA graphs?[^:]*: +(\d+)%"), "capturing graphs, {0} %"),
    (re.compile(r"init engine \(.*\) took ([\d.]+) s"), "engine set up in {0} s, starting the HTTP server"),
    (re.compile(r"Application startup complete"), "HTTP server up, waiting for its health check"),
)
_ERROR = re.compile(r"(?:^|[\s:])((?:\w+\.)*\w*(?:Error|Exception)): .+|error: .+")
_PREFIX = re.compile(r"^\([^)]*pid=\d+\)\s*(?:[A-Z]+ [-\d]+ [:\d]+ )?(?:\[[^\]]*\] ?)?")


def advance(progress: Progress, lines: Iterable[str]) -> Progress:
    """The progress after more lines of the log; a line that begins the output of a new process starts it over."""
    for line in lines:
        if line.startswith(START_LINE):
            progress = Progress()
        elif found := _phase(line):
            progress = msgspec.structs.replace(progress, phase=found)
        elif _ERROR.search(line):
            progress = msgspec.structs.replace(progress, error=_PREFIX.sub("", line).strip()[:300])
    return progress


def latest(log: Path) -> Progress:
    """The progress of an engine's start, by the end of its log; the first phase where there is no such file."""
    return advance(Progress(), tail(log, TAIL_LINES))


def _phase(line: str) -> str:
    for pattern, words in _PHASES:
        if match := pattern.search(line):
            return words.format(*match.groups())
    return ""
