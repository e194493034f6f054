"""Every combination of what prefill and decode may draft with: what is taken, what is warned of, what is refused."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from xpyd_sidecar.contract.speculation import ALIKE, Speculation, difference, mark
from xpyd_sidecar.kv.peers import ALL, DraftRule, draft_rule

DRAFT = ("model.layers.4.self_attn.attn",)
NONE = Speculation()
NGRAM = Speculation("ngram", num_speculative_tokens=3)
SUFFIX = Speculation("suffix", num_speculative_tokens=3)
EAGLE = Speculation("eagle", "a", "bfloat16", num_speculative_tokens=3, layers=DRAFT)
LONGER = msgspec.structs.replace(EAGLE, num_speculative_tokens=5)
OTHER = msgspec.structs.replace(EAGLE, model="b")
MTP = Speculation("mtp", "c", "bfloat16", num_speculative_tokens=3, layers=("mtp.layers.0.self_attn.attn",))
SHARED = Speculation("mtp", "d", "bfloat16", num_speculative_tokens=3)
"""A draft that reads the KV of the model that it drafts for, and has none of its own."""
KINDS = {"none": NONE, "ngram": NGRAM, "suffix": SUFFIX, "eagle": EAGLE, "longer": LONGER, "other": OTHER, "mtp": MTP,
         "shared": SHARED}
ALL_TAKEN = {(a, a) for a in KINDS} | {("eagle", "longer"), ("longer", "eagle")} | set(
    itertools.product(("none", "ngram", "suffix", "shared"), repeat=2))
"""(decode, prefill) of models without states."""
FEW_ACCEPTED = {(d, p) for d in ("eagle", "longer", "other", "mtp") for p in KINDS} - ALL_TAKEN
FOR_NOTHING = {(d, p) for d in ("none", "ngram", "suffix", "shared") for p in ("eagle", "longer", "other", "mtp")}
EVERY = list(itertools.product(KINDS, KINDS))


def with_states(one: Speculation) -> Speculation:
    return msgspec.structs.replace(one, states=True)


def test_the_table_names_every_combination_once() -> None:
    assert len(ALL_TAKEN) + len(FEW_ACCEPTED) + len(FOR_NOTHING) == len(EVERY) == 64
    assert set(EVERY) == ALL_TAKEN | FEW_ACCEPTED | FOR_NOTHING


@pytest.mark.parametrize(("decode", "prefill"), EVERY)
def test_without_states_nothing_is_refused_and_a_draft_of_another_kind_stays(decode: str, prefill: str) -> None:
    d, p = KINDS[decode], KINDS[prefill]
    found = draft_rule(d, p)
    assert found.refused == ""
    if (decode, prefill) in ALL_TAKEN:
        assert found == DraftRule()
        return
    assert found.left_out == set(d.layers) | set(p.layers)
    few = (decode, prefill) in FEW_ACCEPTED
    assert ("few drafts will be accepted" in found.warning) == few
    assert ("costs prefill time" in found.warning) == (not few)
    assert found.warning.startswith("speculation.")


@pytest.mark.parametrize(("decode", "prefill"), EVERY)
def test_with_states_both_must_be_the_same_and_the_field_is_named(decode: str, prefill: str) -> None:
    d, p = with_states(KINDS[decode]), with_states(KINDS[prefill])
    found = draft_rule(d, p)
    if decode == prefill:
        assert found == DraftRule()
        return
    field = next(name for name in ALL if getattr(d, name) != getattr(p, name))
    assert found.refused.startswith(f"speculation.{field}: {getattr(d, field)!r} here, {getattr(p, field)!r} there; the ")
    assert (found.warning, found.left_out) == ("", frozenset())


def test_another_number_of_drafts_is_refused_with_states_alone() -> None:
    assert draft_rule(EAGLE, LONGER) == DraftRule()
    assert draft_rule(with_states(EAGLE), with_states(LONGER)).refused.startswith(
        "speculation.num_speculative_tokens: 3 here, 5 there")


def test_one_side_that_says_it_has_states_is_enough() -> None:
    assert draft_rule(with_states(NGRAM), NONE).refused
    assert draft_rule(NONE, with_states(NGRAM)).refused


@pytest.mark.parametrize(("field", "other"), [("method", "eagle3"), ("model", "z"), ("kv_cache_dtype", "fp8"),
                                              ("auxiliary_layers", (1, 2)), ("parallel_drafting", True)])
def test_all_that_a_drafts_kv_depends_on_counts(field: str, other: object) -> None:
    assert field in ALIKE
    there = msgspec.structs.replace(EAGLE, **{field: other})
    said = f"speculation.{field}: {getattr(EAGLE, field)!r} here, {other!r} there; "
    assert draft_rule(EAGLE, there).warning.startswith(said)


def test_names_of_layers_do_not_make_drafts_different() -> None:
    there = msgspec.structs.replace(EAGLE, layers=("model.layers.9.self_attn.attn",))
    assert difference(EAGLE, there) == ""
    assert draft_rule(EAGLE, there) == DraftRule(), "the map of arrays says what differs"


def test_routers_hear_of_it_where_states_make_it_a_matter_of_pairing() -> None:
    assert [mark(one) for one in KINDS.values()] == [""] * len(KINDS)
    marks = {name: mark(with_states(one)) for name, one in KINDS.items()}
    assert marks.pop("none") == ""
    assert len(set(marks.values())) == len(marks)
    assert all(len(one) == 8 for one in marks.values())
    assert mark(with_states(EAGLE)) == mark(with_states(msgspec.structs.replace(EAGLE, layers=())))
