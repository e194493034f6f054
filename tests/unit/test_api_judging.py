"""Arguments by which engines judge requests, where the roles have other ones."""

from __future__ import annotations

import pytest
from render_service import service

from xpyd_operator.api.judging import JUDGING, notes


@pytest.mark.parametrize(("engine", "prefill", "decode", "expected"), [
    ([], [], ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"],
     [("spec.decode.args[0]", "--enable-auto-tool-choice is set for decode alone"),
      ("spec.decode.args[1]", "--tool-call-parser is set for decode alone")]),
    (["--tool-call-parser", "hermes"], [], [], []),
    ([], ["--tool-call-parser", "hermes"], ["--tool_call_parser=hermes"], []),
    ([], ["--max-model-len=1024"], ["--max-model-len", "2048"],
     [("spec.prefill.args[0]", "--max-model-len differs from the other role's")]),
    (["--max-model-len=1024"], [], ["--dtype", "float32", "--max-model-len", "2048"],
     [("spec.decode.args[2]", "--max-model-len differs from the other role's")]),
    (["--max-model-len=1024"], ["--max-model-len=1", "--max-model-len", "1024"], [], []),
    ([], ["--lora-modules", "a=/x", "b=/y"], ["--lora-modules", "a=/x"],
     [("spec.prefill.args[0]", "--lora-modules differs from the other role's")]),
    ([], ["--max-num-seqs", "8"], ["--max-num-seqs", "64"], []),
])
def test_what_is_worth_saying(engine: list[str], prefill: list[str], decode: list[str],
                              expected: list[tuple[str, str]]) -> None:
    found = notes(service(engine={"args": engine}, prefill={"args": prefill}, decode={"args": decode}))
    assert [(fault.path, fault.message.split(": ")[0]) for fault in found] == expected
    assert all("write it in spec.engine.args" in fault.message for fault in found)


def test_a_role_without_instances_judges_nothing() -> None:
    assert not notes(service(prefill={"replicas": 0}, decode={"args": ["--tool-call-parser", "hermes"]}))


def test_they_are_named_in_full() -> None:
    assert all(name.startswith("--") and name == name.lower() and "_" not in name for name in JUDGING)
