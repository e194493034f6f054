from corpus import BLOCK, Reference, Verdict, judge, lengths, mixed, prefixes


def test_a_mismatch_where_the_plain_engine_was_sure_is_wrong() -> None:
    assert judge(Reference((5, 6, 7), (0.9, 0.5, 0.8)), (5, 9, 7)) is Verdict.WRONG


def test_a_mismatch_where_the_plain_engine_saw_a_tie_is_a_near_tie() -> None:
    assert judge(Reference((5, 6, 7), (0.9, 0.0005, 0.8)), (5, 9, 1)) is Verdict.NEAR_TIE


def test_a_short_answer_is_wrong() -> None:
    assert judge(Reference((5, 6), (0.9, 0.9)), (5,)) is Verdict.WRONG
    assert judge(Reference((5, 6), (0.9, 0.9)), (5, 6, 7)) is Verdict.WRONG
    assert judge(Reference((5, 6), (0.9, 0.9)), (5, 6)) is Verdict.EQUAL


def test_the_corpus_has_at_least_thirty_prompts_with_every_block_edge() -> None:
    sizes = {len(case.prompt) for case in lengths()}
    assert len(lengths()) + len(prefixes()) >= 30
    assert {1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 1900} <= sizes


def test_mixed_requests_are_the_same_every_time_and_distinct() -> None:
    assert mixed(200) == mixed(200)
    assert len({case.prompt for case in mixed(200)}) > 150
