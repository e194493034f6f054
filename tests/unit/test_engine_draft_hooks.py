"""A draft that does not run in prefill's steps is told of, and nothing else is."""

from __future__ import annotations

import pytest

from xpyd_sidecar.engine.worker.draft_hooks import DraftHooks

DRAFT = frozenset({"draft"})


def told(caplog: pytest.LogCaptureFixture, layers: frozenset[str], *steps: tuple[list[str], bool]) -> int:
    hooks = DraftHooks(layers)
    for called, pushes in steps:
        hooks.begin()
        for layer in called:
            hooks.on_layer(layer)
        hooks.finish(pushes=pushes)
    return caplog.text.count("the draft has written no KV")


@pytest.mark.parametrize(("steps", "times"), [
    ([(["a", "b", "draft", "draft"], True)], 0),
    ([(["a", "b"], True)], 1),
    ([(["a", "b"], True), (["a", "b"], True)], 1),
    ([(["a", "draft"], True), (["a", "b"], True)], 1),
    ([(["a", "b"], False)], 0),
    ([([], True)], 0),
], ids=["it runs", "it does not", "once", "not any more", "nothing leaves", "a whole graph"])
def test_it_is_said_where_layers_were_seen_and_the_drafts_were_not(
        caplog: pytest.LogCaptureFixture, steps: list[tuple[list[str], bool]], times: int) -> None:
    assert told(caplog, DRAFT, *steps) == times


def test_an_engine_without_a_draft_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, frozenset(), (["a"], True)) == 0
