"""Text arrives as it was written, whatever Kubernetes would make of it."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from xpyd_operator.render.literal import literal, literals


def expand(text: str, known: dict[str, str]) -> str:
    """Kubernetes' own rules (third_party/forked/golang/expansion)."""
    result, at = "", 0
    while at < len(text):
        after = text[at + 1 : at + 2]
        if text[at] != "$" or not after:
            result, at = result + text[at], at + 1
        elif after == "$":
            result, at = result + "$", at + 2
        elif after == "(" and (end := text.find(")", at)) >= 0:
            name = text[at + 2 : end]
            result, at = result + known.get(name, f"$({name})"), end + 1
        else:
            result, at = result + "$" + after, at + 2
    return result


@given(st.text(alphabet="$()A x", max_size=20))
@example("$(A)")
@example("$$(A)")
@example("$")
@example("$$")
@example("$(A")
def test_nothing_is_expanded(text: str) -> None:
    assert expand(literal(text), {"A": "wrong"}) == text


def test_the_oracle_expands_what_is_not_escaped() -> None:
    assert expand("$(A) $$(A) $(B) $A", {"A": "1"}) == "1 $(A) $(B) $A"


def test_texts_inside_lists_and_dictionaries() -> None:
    assert literals({"a": ["$(A)", 1, None], "b": {"c": "$"}, "d": True}) == {
        "a": ["$$(A)", 1, None], "b": {"c": "$$"}, "d": True}
