"""Hand-overs of other kinds than the default, between two real engines: each equals the answer of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
from engine_pair import OUTPUT, SOON_S, Pair, started, tokens

pytestmark = [pytest.mark.engines, pytest.mark.smoke, pytest.mark.timeout(900)]
LENGTHS = (1, 129, 700)


class Way(NamedTuple):
    """What the engines are started with."""

    mode: str = "put_async"
    decode_args: tuple[str, ...] = ()


WAYS = {
    "put": Way("put"),
    "get": Way("get"),
    "one rank to two": Way(decode_args=("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")),
}


@pytest.fixture(params=WAYS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Patient, since workers of one engine poll at full speed."""
    way = WAYS[request.param]
    yield from started(Pair(tmp_path_factory.mktemp("ways"), policy="fail", decode_args=way.decode_args, mode=way.mode,
                            peer_timeout_s=SOON_S, load_timeout_s=SOON_S, claim_s=SOON_S))


def test_decode_answers_like_a_plain_engine_and_computes_the_last_token_alone(pair: Pair) -> None:
    for length in LENGTHS:
        prompt, before = tokens(length), pair.computed()
        got = pair.both(prompt)
        pair.wait_empty()
        assert pair.computed() - before == OUTPUT + 1, length
        assert got == pair.plain(prompt), length
