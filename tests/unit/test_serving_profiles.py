from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any, Literal

import pytest

from xpyd_sidecar.contract import legs
from xpyd_sidecar.contract.ids import Attempt, HostPort, Incarnation, InstanceName, Role, TransferId
from xpyd_sidecar.router.api import bodies
from xpyd_sidecar.router.api.failover_modes import SamplingTerms
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.serving import profiles
from xpyd_sidecar.router.serving.profiles import MAX_PROFILES, Profiles
from xpyd_sidecar.router.stream import continuation
from xpyd_sidecar.router.stream.position import Position

Api = Literal["completions", "chat"]
PEER = legs.Peer(InstanceName('d"1%b%'), Incarnation("i"), HostPort("h:1"))
LEGS = [legs.Leg(1, Role.PREFILL, TransferId("ab" * 16), Attempt(1), 60.0, PEER),
        legs.Leg(1, Role.PREFILL, TransferId("cd" * 16), Attempt(3), 1.25, PEER, 599.125),
        legs.Leg(1, Role.DECODE, TransferId("ef" * 16), Attempt(1), 60.0, None),
        legs.Leg(1, Role.DECODE, TransferId("ef" * 16), Attempt(1), 60.0, None, 660.0)]
VALUES: dict[str, list[Any]] = {
    "model": ["tiny", "tiny", "tiny", None, "", 7], "stream": [True, True, True, False, None, "yes", 1, 0.0, "off", 2],
    "prompt": ["hi", "100 %b %d %%", "é", "x" * 2000, [1, 2, 3], ["a", "b"], None, ""],
    "messages": [[{"role": "user", "content": "hi %s"}], [{"role": "user", "content": [{"type": "image_url"}]}], [], "text",
                 None],
    "max_tokens": [1, 8, 999_999_999, 1_000_000_000, -1, 1.5, None, "8", True], "max_completion_tokens": [1, 20, None],
    "temperature": [0, 0, 0, 1, None], "seed": [1, 2, -5, None, 1.5], "user": ["ann", "bob", None, 7, "%"], "n": [1, 2],
    "stop": ["%", ["a", "b"]], "stream_options": [{"include_usage": True}, None], "return_token_ids": [True, False],
    "logprobs": [1, True, None], "echo": [True, False], "best_of": [1, 3], "tools": [[], [{"type": "function"}]],
    "presence_penalty": [0, 0.5], "kv_transfer_params": [None, {}], "vllm_xargs": [{}, {"kv_transfer_params": 1}],
    "new": [{"a": "%b"}],
    "priority": [1], "request_id": ["r"], "prompt_logprobs": [1], "truncate_prompt_tokens": [-1, 5],
}


def made_up(api: Api, dice: random.Random) -> bytes:
    names = ["model", "prompt" if api == "completions" else "messages", "max_tokens", "temperature", "stream"]
    rare = [name for name in VALUES if name not in names]
    names += dice.sample(rare, dice.choice([0, 0, 0, 1, 1, 2, 3]))
    if dice.random() < 0.2:
        dice.shuffle(names)
    odd = dice.random() < 0.4
    fields = {name: dice.choice(VALUES[name]) if odd else dice.choice(VALUES[name][:3]) for name in names}
    pretty = dice.random() < 0.2
    return json.dumps(fields, indent=1 if pretty else None, separators=None if pretty else (",", ":"),
                      ensure_ascii=dice.random() < 0.5).encode()


def parsed(parse: Callable[[Api, bytes], Any], api: Api, body: bytes) -> Any:
    try:
        return parse(api, body)
    except HttpFault as fault:
        return f"{fault.status} {fault}"


def attributes(position: Position | None) -> tuple[Any, ...] | None:
    return position and (position.api, position.way, position.asked_ids, position.wants_usage, position.choices,
                         position.shows_logprobs, position.replays)


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_a_profile_is_what_the_tables_say_of_each_of_its_requests(api: Api, goes_on: bool) -> None:
    dice, known, again = random.Random(5), Profiles(goes_on=goes_on, speaks=True), 0
    for _ in range(2000):
        body = made_up(api, dice)
        expected, found = parsed(bodies.parse, api, body), parsed(known.parse, api, body)
        if isinstance(expected, str) or isinstance(found, str):
            assert found == expected
            continue
        request, profile = found
        assert request == expected
        position = continuation.position_of(expected, goes_on=goes_on)
        assert attributes(profile.begins) == attributes(position)
        assert profile.speaks == continuation.speaks_first(expected, position)
        if not profile.known:
            continue
        again += 1
        asked = continuation.first_request(expected, position)
        for leg in LEGS:
            assert profile.body(request.prompt, leg) == bodies.body_of(asked, leg.role, leg)
    assert again > 200


def test_a_profile_is_known_from_the_second_request_on_and_they_are_bounded() -> None:
    known = Profiles(goes_on=True, speaks=False)
    seen = [known.parse("completions", b'{"prompt":"%d","max_tokens":7}' % n)[1] for n in range(3)]
    assert seen[0] is seen[1] is seen[2]
    assert seen[0].known
    for number in range(3 * MAX_PROFILES):
        known.parse("completions", b'{"prompt":"a","top_k":%d}' % number)
        assert len(known._known) <= MAX_PROFILES
    for odd in (b'{"prompt":"a","stop":"%b"}' % (b"s" * profiles.MAX_BYTES), b'{"prompt":[1,2]}', b'{"max_tokens":1}'):
        for _ in range(3):
            assert not known.parse("completions", odd)[1].known, odd
    for _ in range(3):
        assert not known.parse("chat", b'{"messages":[{"content":[{"type":"image_url"}]}]}')[1].known


def test_a_profile_keeps_nothing_of_the_prompt_it_was_made_of() -> None:
    known = Profiles(goes_on=True, speaks=False)
    body = b'{"model":"tiny","prompt":"%b","max_tokens":7}' % (b"secret" * 1000)
    before = sys.getrefcount(body)
    _, profile = known.parse("completions", body)
    del _
    assert sys.getrefcount(body) == before
    assert profile._asked is not None
    assert b"secret" not in b"".join(bytes(raw) for raw in profile._asked.fields.values())


def test_profiles_go_with_what_engines_tell() -> None:
    terms = [SamplingTerms()]
    known = Profiles(goes_on=True, speaks=False, terms=lambda: terms[0])
    body = b'{"prompt":"a","temperature":1,"stream":true}'
    _, before = known.parse("completions", body)
    terms[0] = SamplingTerms(sampled=True)
    assert known.parse("completions", body)[1] is before, "nobody has doubted them"
    known.invalidate()
    _, after = known.parse("completions", body)
    assert (before.terms.sampled, after.terms.sampled) == (False, True)
    known.invalidate()
    assert known.parse("completions", body)[1] is after, "they are the same"


def test_parameters_of_a_leg_are_as_the_contract_writes_them() -> None:
    for leg in LEGS:
        assert json.loads(bodies.params_of(leg, "chat")) == legs.encode(leg)
