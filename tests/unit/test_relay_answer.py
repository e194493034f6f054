from __future__ import annotations

import os
import random
from typing import Any, Literal

import pytest
from fuzz.reads import forget
from recorded import load

from xpyd_sidecar.router.api.failover_modes import FailoverMode
from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.relay import fast, plain
from xpyd_sidecar.router.stream import token_recorder
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import stream_of

TAKE = fast.take
COMPILED = fast.COMPILED
compiled = pytest.mark.skipif(not COMPILED, reason="nothing was compiled here")
Api = Literal["completions", "chat"]
END = chunk_of(b"data: [DONE]\n\n") + b"0\r\n\r\n"
CASES = int(os.environ.get("XPYD_FUZZ", "1500"))
WORDS = ["a", "", "\\n", '\\"finish_reason\\":\\"abort\\"', "ü", "]", "data: [DONE]", "x" * 300, "}", "\\u00e9",
         "\\ud83d\\ude00", "😀",
         '\\"token_ids\\":[1]', "\\", "\t", "\\x", "\u2028"]


class Dice(random.Random):
    """``usual`` is the first of several, but for an odd stream's now and then."""

    odd = False

    def usual(self, *options: str) -> str:
        return self.choice(options) if self.odd and self.random() < 0.06 else options[0]


def choice_of(api: Api, dice: Dice, number: int, *, last: bool) -> str:
    word = dice.choice(WORDS[:12]) if dice.random() < 0.5 else dice.usual(*WORDS)
    usual = dice.choice([f'{{"content":"{word}"}}', "{}", f'{{"reasoning":"{word}","content":null}}']) if number else (
        '{"role":"assistant","content":""}')
    delta = dice.usual(usual, '{"role":"assistant","content":""}', '{"content":null}',
                       f'{{"role":"assistant","content":"{word}"}}',
                       f'{{"content":"{word}","tool_calls":[]}}', f'{{"content":"{word}","content":"b"}}', '{"role":7}')
    ids = dice.usual(dice.choice([f"[{number}]", f"[{number},7]", "null"]), "[]", "[1,]", "[01]", '["a"]', "[ 1]", "{}")
    reason = dice.usual(dice.choice(['"stop"', '"length"'])) if last else dice.usual("null", '"abort"', '"stop"', "7")
    parts = [f'"index":{dice.usual("0", "1", "00")}',
             f'"delta":{delta}' if api == "chat" else f'"text":{dice.usual(chr(34) + word + chr(34), "null", "7")}',
             f'"logprobs":{dice.usual("null", "{}")}', f'"finish_reason":{reason}']
    if dice.random() < 0.5:
        parts.append(f'"stop_reason":{dice.choice(["null", "7", chr(34) + word + chr(34)])}')
    if dice.random() < 0.95:
        parts.append(f'"token_ids":{ids}')
    if api == "completions" and number == 0:
        parts.append(dice.choice(['"prompt_logprobs":null,"prompt_token_ids":[5,6]', '"prompt_token_ids":null']))
    if dice.odd and dice.random() < 0.05:
        parts.append(dice.choice(['"more":1', '"index":0', '"ind\\u0065x":1', '"finish_reason":"stop"']))
    if dice.random() < 0.05:
        dice.shuffle(parts)
    return "{" + ",".join(parts) + "}"


def event(api: Api, dice: Dice, number: int, *, last: bool) -> bytes:
    choices = choice_of(api, dice, number, last=last)
    choices = dice.usual(choices, "", choices + "," + choices)
    name = dice.usual("c", "", "other", "\\u0063")
    parts = [f'"id":"{name}"', '"object":"x"', f'"created":{dice.usual("1", "-1", "1.0")}', '"model":"m"',
             f'"choices":[{choices}]']
    if dice.random() < 0.05:
        parts.append(dice.choice(['"usage":null', '"usage":{"total_tokens":3,"details":{"cached":null}}',
                                  '"prompt_text":null', '"system_fingerprint":null']))
    if dice.odd and dice.random() < 0.05:
        parts.append(dice.choice(['"usage":{}', '"usage":7', '"error":{}', '"finish_reason":"abort"', '"created":2',
                                  '"id":"d"']))
    if api == "chat" and (number == 0 or (dice.odd and dice.random() < 0.02)):
        parts.append(f'"prompt_token_ids":{dice.usual(dice.choice(["[7,8]", "[1]", "null"]), "[]", "[7, 8]")}')
    if dice.random() < 0.05:
        dice.shuffle(parts)
    return ("data: {" + ",".join(parts) + "}\n\n").encode()


def made_up(api: Api, dice: Dice) -> bytes:
    """An answer as engines write it, with now and then something that is unlike it."""
    dice.odd = dice.random() < 0.6
    count = dice.randrange(1, 8)
    events = [event(api, dice, number, last=number == count - 1) for number in range(count)]
    if dice.random() < 0.3:
        events.append(b'data: {"id":"c","object":"x","created":1,"model":"m","choices":[],"usage":{"total_tokens":9}}\n\n')
    if dice.odd and dice.random() < 0.04:
        events.insert(dice.randrange(count), dice.choice([b": a comment\n\n",
                                                          b'data: {"error":{"message":"dead","code":500}}\n\n',
                                                          b"data: [DONE]\n\n", b"data: {}\n\n"]))
    raw = b"".join(map(chunk_of, events)) + END
    if dice.odd and dice.random() < 0.3:
        at = dice.randrange(len(raw))
        there = dice.choice([b"", bytes([dice.randrange(256)]), dice.choice([b'"', b"}", b"]", b",", b"\\", b"0"])])
        raw = raw[:at] + there + raw[at + dice.randrange(2):]
    return raw


def cut(raw: bytes, dice: Dice) -> list[bytes]:
    """One read, or several, mostly of whole chunks."""
    if dice.random() < 0.4:
        return [raw]
    ends = [at + 4 for at in range(len(raw)) if raw.startswith(b"\n\n\r\n", at)]
    if dice.random() < 0.2:
        ends = list(range(1, len(raw)))
    at = sorted(dice.sample(ends, min(len(ends), dice.randrange(1, 4))))
    return [part for part in (raw[i:j] for i, j in zip([0, *at], [*at, len(raw)], strict=True)) if part]


def known(position: Position) -> tuple[Any, ...]:
    try:
        have: Any = position.have()
    except ValueError as error:  # ids that are no list of numbers were noted as any others
        have = str(error)
    return (position.id, position.created, position.model, position.prompt, position.roles, position.finished,
            position.usage_sent, position.tokens, position.prompt_tokens, position.tail(), have)


def read(api: Api, reads: list[bytes], *, framed: bool = True, asked_ids: bool = False) -> tuple[Any, ...]:
    """Everything that can be told of a stream behind it."""
    forget()
    position = Position(api, FailoverMode.CONTINUE, asked_ids=asked_ids, wants_usage=True)
    stream = stream_of(position, framed=framed)
    out = []
    for data in reads:
        if stream.failure or stream.done:
            break
        out.append(stream.feed(data))
    ends = stream.ended, stream.done, stream.failure, stream.kind, stream._clean
    return b"".join(out), ends, known(position)


@compiled
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_an_answer_taken_in_one_call_is_the_same_as_one_taken_event_by_event(
        api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    dice, taken = Dice(int(os.environ.get("XPYD_SEED", "3"))), 0
    count = [0]

    def counted(*given: Any) -> Any:
        found = TAKE(*given)
        count[0] += found is not None
        return found

    for number in range(CASES):
        raw = made_up(api, dice)
        reads = cut(raw, dice)
        options: dict[str, Any] = {"framed": number % 17 != 0, "asked_ids": number % 13 == 0}
        monkeypatch.setattr(token_recorder, "take", plain.take)
        expected = read(api, reads, **options)
        if isinstance(expected[2][-1], str):
            continue  # fields in another order than those that were learned from: what was noted cannot be read
        monkeypatch.setattr(token_recorder, "take", counted)
        assert read(api, reads, **options) == expected, raw
        taken = count[0]
    assert taken > CASES // 8, "it is worth comparing"


@compiled
def test_whole_answers_of_a_real_engine_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = taken = 0
    for request in load().requests:
        for events in (request.ids, request.plain):
            raw = b"".join(chunk_of(b"data: %b\n\n" % one.encode()) for one in events) + END
            monkeypatch.setattr(token_recorder, "take", plain.take)
            expected = read(request.api, [raw])  # type: ignore[arg-type]
            monkeypatch.setattr(token_recorder, "take", TAKE)
            assert read(request.api, [raw]) == expected  # type: ignore[arg-type]
            if "logprobs" not in request.body and request.body.get("n", 1) == 1 and "tools" not in request.body:
                seen += 1
                taken += TAKE(raw, request.api == "chat", "", 0, bytearray()) is not None
    assert seen > 4
    assert taken > 0.8 * seen


@compiled
def test_what_is_not_taken_leaves_no_trace() -> None:
    good = chunk_of(b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a","token_ids":[1]}]}\n\n')
    log = bytearray(b"before")
    for bad in (b"", END, good + END[:-1], good + b"zz\r\n" + END, good + END + b" ", END + good, good[:-3] + END):
        assert TAKE(bad, False, "", 0, log) is None
    assert TAKE(good + END, False, "d", 1, log) is None, "of another stream"
    assert TAKE(good + END, True, "", 0, log) is None, "not of this API"
    assert log == b"before"
    bare = b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a","token_ids":null}]}\n\n'
    assert TAKE(good + END, False, "", 0, log) == (
        chunk_of(bare) + END[:-5], "c", 1, "m", b"", 0, 0, 0, 1, 4, len(good) - 4, 0)
    assert log == b'before"a"\t1\n'
    in_the_middle = TAKE(good, False, "c", 1, log)
    assert in_the_middle == (chunk_of(bare), "c", 1, "m", b"", 0, 0, 0, 0, 4, len(good) - 4, 0)
    assert log == b'before"a"\t1\n"a"\t1\n'
    for ids, count in ((b"[5]", 1), (b"[5,600,7]", 3), (b"null", 0)):
        first = chunk_of(b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a",'
                         b'"logprobs":null,"finish_reason":null,"prompt_token_ids":%b,"token_ids":[1]}]}\n\n' % ids)
        found = TAKE(first, False, "", 0, bytearray())
        assert found is not None
        assert (found[4], found[-1]) == (b"" if ids == b"null" else ids[1:-1], count)
    for late in (1 << 63, -(1 << 63) - 1, 1 << 80):
        assert TAKE(good, False, "c", late, log) is None, "a time that no event says that is taken"
    assert log == b'before"a"\t1\n"a"\t1\n'
    with pytest.raises(TypeError):
        TAKE("text", False, "", 0, log)  # type: ignore[arg-type]
