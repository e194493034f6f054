"""Changes are named by function and text: they survive moves of lines, and say by name when they no longer fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lab.mutation import operators
from lab.mutation.functions import Change, UnfitError, apply, change_of_lines, function_at, module_of, moved, path_of
from mutated import CODE, MODULE, tree


def test_a_change_is_found_wherever_its_function_stands() -> None:
    change = Change(MODULE, "double", "number > LIMIT", "number < LIMIT")
    expected = CODE.replace("if number > LIMIT", "if number < LIMIT")
    assert apply(CODE, change) == expected
    assert apply("# moved\n\n" + CODE, change) == "# moved\n\n" + expected


def test_the_same_text_in_another_function_is_left_alone() -> None:
    assert apply(CODE, Change(MODULE, "Counter.count", "LIMIT", "7")) == CODE.replace("seen < LIMIT", "seen < 7")


def test_both_halves_of_a_property_are_one_function() -> None:
    assert "return 2" in apply(CODE, Change(MODULE, "Counter.size", "return 1", "return 2"))
    assert "value - 1" in apply(CODE, Change(MODULE, "Counter.size", "value + 1", "value - 1"))


@pytest.mark.parametrize(("change", "words"), [
    (Change(MODULE, "Counter.counts", "LIMIT", "7"), "xpyd_sidecar.kv.toy:Counter.counts: there is no such function"),
    (Change(MODULE, "double", "number < 1", "True"), "xpyd_sidecar.kv.toy:double: the text is not there: 'number < 1'"),
    (Change(MODULE, "double", "LIMIT", "7"), "xpyd_sidecar.kv.toy:double: the text is there 2 times: 'LIMIT'"),
    (Change(MODULE, "double", "LIMIT", "7", 2), "number 2 is meant of 2 of the text"),
    (Change(MODULE, "double", "LIMIT:", "LIMIT"), "xpyd_sidecar.kv.toy:double: what comes out is no Python"),
    (Change(MODULE, "double", "* 2", "* 2"), "xpyd_sidecar.kv.toy:double: nothing changes: '* 2'"),
])
def test_what_no_longer_fits_is_named(change: Change, words: str) -> None:
    with pytest.raises(UnfitError) as error:
        apply(CODE, change)
    assert words in str(error.value)


def test_of_several_occurrences_one_is_meant() -> None:
    assert apply(CODE, Change(MODULE, "double", "LIMIT", "7", 1)) == CODE.replace("number = LIMIT", "number = 7")


def test_modules_and_files_belong_together(tmp_path: Path) -> None:
    tree(tmp_path)
    assert path_of(tmp_path, MODULE) == tmp_path / "sidecar/src/xpyd_sidecar/kv/toy.py"
    assert path_of(tmp_path, "xpyd_sidecar.kv") == tmp_path / "sidecar/src/xpyd_sidecar/kv/__init__.py"
    names = ("sidecar/src/xpyd_sidecar/kv/toy.py", "operator/src/xpyd_operator/__init__.py", "tests/unit/test_kv_toy.py")
    assert [module_of(Path(name)) for name in names] == [MODULE, "xpyd_operator", ""]
    for module in ("xpyd_sidecar.kv.gone", "json"):
        with pytest.raises(UnfitError, match=module):
            path_of(tmp_path, module)


def test_a_function_that_has_moved_to_another_module_is_found_where_it_is_now(tmp_path: Path) -> None:
    module = tree(tmp_path) / "sidecar/src/xpyd_sidecar/kv/toy.py"
    change = Change(MODULE, "double", "number * 2", "0", 0)
    assert moved(tmp_path, change) == change
    module.rename(module.with_name("other.py"))
    assert moved(tmp_path, change) == replace(change, module="xpyd_sidecar.kv.other")
    module.with_name("third.py").write_text(CODE)
    assert moved(tmp_path, change) == change, "which of two it is nobody knows"


def test_the_innermost_function_is_meant() -> None:
    lines = CODE.splitlines()
    found = {text.strip(): function_at(CODE, lines.index(text) + 1)
             for text in ("LIMIT = 100", "    return number * 2", "    @size.setter", "class Counter:")}
    assert found == {"LIMIT = 100": "", "return number * 2": "double", "@size.setter": "Counter.size",
                     "class Counter:": "Counter"}


def test_a_difference_becomes_a_change_that_makes_it() -> None:
    for old, new in (("number * 2", "number * 3"), ("number = LIMIT", "number = None"), ("    @property\n", "\n")):
        change = change_of_lines(CODE, CODE.replace(old, new), MODULE)
        assert apply(CODE, change) == CODE.replace(old, new)
        assert not change.before.startswith(" ") or old.startswith(" ")


def test_comparisons_and_junctions_are_turned_round_one_at_a_time() -> None:
    found = list(operators.changes_in(CODE, MODULE))
    assert sorted((one.function, one.after) for one in found) == [
        ("Counter.count", "return seen + 1 if seen > 0 and seen < LIMIT else 0"),
        ("Counter.count", "return seen + 1 if seen >= 0 and seen <= LIMIT else 0"),
        ("Counter.count", "return seen + 1 if seen >= 0 or seen < LIMIT else 0"),
        ("double", "if number >= LIMIT:")]
    assert all(apply(CODE, one).count("\n") == CODE.count("\n") for one in found)


def test_a_draw_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    root = tree(tmp_path)
    draws = [operators.draw(root, 3, seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert [len(draw) for draw in draws] == [3, 3, 3]
    assert operators.draw(root, 3, 1, ("*.kv.toy",)) == []
