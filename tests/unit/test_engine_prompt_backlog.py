"""What an engine has of prompts and has not computed."""

from __future__ import annotations

import random

from xpyd_sidecar.contract.core_steps import PromptWork
from xpyd_sidecar.engine.scheduler.prompt_backlog import PromptBacklog


def test_a_prompt_is_queued_until_its_steps_have_computed_it() -> None:
    backlog = PromptBacklog()
    backlog.arrives("a", 1000)
    backlog.arrives("b", 300)
    assert backlog.prompt_work == PromptWork(1300, 0)
    backlog.begins("a", 256)
    assert backlog.prompt_work == PromptWork(1044, 0), "what is cached is not computed"
    backlog.runs({"a": 512, "c": 1})
    assert backlog.prompt_work == PromptWork(532, 512)
    backlog.runs({"a": 232, "c": 1})
    backlog.runs({"a": 1, "c": 1})
    assert backlog.prompt_work == PromptWork(300, 744), "tokens of answers are none of prompts"
    assert backlog.remove("a") == 256
    assert backlog.remove("b") == -1, "it never ran"
    assert backlog.prompt_work == PromptWork(0, 744)


def test_a_prompt_that_is_all_there_leaves_nothing() -> None:
    backlog = PromptBacklog()
    backlog.arrives("a", 100)
    backlog.begins("a", 100)
    backlog.runs({"a": 1})
    assert (backlog.prompt_work, backlog.remove("a")) == (PromptWork(0, 0), 100)


def test_who_was_never_counted_is_nobody() -> None:
    backlog = PromptBacklog()
    backlog.begins("a", 5)
    backlog.runs({"a": 5})
    assert (backlog.remove("a"), backlog.prompt_work) == (-1, PromptWork())


def test_whatever_happens_it_is_the_sum_of_what_is_left_and_what_ends_leaves_nothing() -> None:
    draw, backlog, left = random.Random(4), PromptBacklog(), dict[str, int]()
    computed = 0
    for number in range(4000):
        match draw.randrange(4):
            case 0:
                left[f"r{number}"] = draw.randrange(1, 900)
                backlog.arrives(f"r{number}", left[f"r{number}"])
            case 1 if left:
                name, there = draw.choice(list(left)), draw.randrange(400)
                backlog.begins(name, there)
                left[name] = max(0, left[name] - there)
            case 2 if left:
                name, tokens = draw.choice(list(left)), draw.randrange(1, 300)
                computed += min(left[name], tokens)
                left[name] -= min(left[name], tokens)
                backlog.runs({name: tokens, "another": 1})
            case 3 if left:
                name = draw.choice(list(left))
                backlog.remove(name)
                del left[name]
        assert backlog.prompt_work == PromptWork(sum(left.values()), computed)
    for name in list(left):
        backlog.remove(name)
    assert backlog.prompt_work.queued == 0
    assert not backlog._left
    assert not backlog._cached
