"""The innermost cause of an engine's end, out of its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_operator.plan.cause import LONGEST, cause

LOGS = Path(__file__).parents[1] / "data" / "engine_ends"
KINDS = "ValueError: Failed to promote local KV cache specs to one unified type."
BEGIN = "Traceback (most recent call last):"
FRAME = ['  File "a.py", line 1, in f', "    g()", "    ^^^"]
END = [BEGIN, *FRAME, "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"]
FROM = ["", "The above exception was the direct cause of the following exception:", ""]
DURING = ["", "During handling of the above exception, another exception occurred:", ""]


def of(who: str, lines: list[str]) -> list[str]:
    return [f"({who}) ERROR 11-25 21:53:42 [core.py:1510] {line}" for line in lines]


def raised(words: str) -> list[str]:
    return [BEGIN, *FRAME, words]


def test_a_real_log_of_a_model_with_two_kinds_of_caches() -> None:
    lines = (LOGS / "two_kinds_of_cache.log").read_text().splitlines()
    assert "See root cause above" in lines[-3] + lines[-2] + lines[-1]
    assert cause(lines) == KINDS


TABLE: dict[str, tuple[list[str], str]] = {
    "nothing": ([], ""),
    "no traceback": (["INFO: all is well", "ERROR 11-25 21:53:42 [a.py:1] bad"], ""),
    "one": (raised("KeyError: 'x'"), "KeyError: 'x'"),
    "without words": (raised("NotImplementedError"), "NotImplementedError"),
    "of a module": (raised("torch.OutOfMemoryError: CUDA out of memory."), "torch.OutOfMemoryError: CUDA out of memory."),
    "of the core": (of("EngineCore pid=2", raised("ValueError: no")) + END, "ValueError: no"),
    "of a worker": (
        of("Worker_TP1 pid=3", raised("OSError: no space"))
        + of("EngineCore pid=2", raised("Exception: WorkerProc initialization failed. See stack trace for root cause."))
        + END, "OSError: no space"),
    "only told of": (END, END[-1]),
    "raised from": (raised("OSError: a") + FROM + raised("ValueError: b") + FROM + raised("TypeError: c"), "OSError: a"),
    "raised while handling": (raised("KeyError: 1") + DURING + raised("ValueError: none such"), "ValueError: none such"),
    "both": (raised("KeyError: 1") + DURING + raised("OSError: a") + FROM + raised("ValueError: b"), "OSError: a"),
    "told of while handling": (raised("OSError: disk") + DURING + END, "OSError: disk"),
    "an earlier one that was overcome": (raised("ImportError: no flash") + raised("ValueError: no"), "ValueError: no"),
    "of validation": (
        [BEGIN, *FRAME, "pydantic_core.ValidationError: 1 validation error for ModelConfig",
         "  Value error, this model does not support it [type=value_error]", "    For further information visit https://x"],
        ("pydantic_core.ValidationError: 1 validation error for ModelConfig: Value error, this model does not support it "
         "[type=value_error]")),
    "of arguments": (["usage: api_server.py [-h]", "api_server.py: error: unrecognized arguments: e/f"],
                     "unrecognized arguments: e/f"),
    "words like an exception outside of a traceback": (["ValueError: seen and dealt with"], ""),
}


@pytest.mark.parametrize("case", TABLE)
def test_cause(case: str) -> None:
    lines, expected = TABLE[case]
    assert cause(lines) == expected


def test_lines_of_processes_may_be_mixed() -> None:
    worker, core = of("Worker pid=3", raised("OSError: a")), of("EngineCore pid=2", raised("Exception: see root cause"))
    mixed = [line for pair in zip(worker, core, strict=True) for line in pair]
    assert cause(mixed + END) == "OSError: a"


def test_it_is_bounded() -> None:
    words = cause(raised(f"ValueError: {'x' * 5000}"))
    assert (len(words), words[-1]) == (LONGEST, "…")


def test_a_log_that_begins_in_the_middle_of_a_traceback() -> None:
    assert cause([*FRAME, "ValueError: half", *raised("OSError: whole")]) == "OSError: whole"
    assert cause([*FRAME[1:], "ValueError: half"]) == ""
    assert cause([*FRAME[1:], "ValueError: half", "warnings.warn('leaked')"], cut=True) == "ValueError: half"
