from __future__ import annotations

import json
import re
from collections.abc import Iterable

import pytest

from xpyd_sidecar.router.api.failover_modes import FailoverMode
from xpyd_sidecar.router.api.faults import FailureKind
from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.stream.events import EventStream, only_comments
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import stream_of


def token(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def error(code: object, message: str = "it died") -> bytes:
    return b"data: " + json.dumps({"error": {"message": message, "type": "X", "param": None,
                                             "code": code}}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"
NASTY = 'data: [DONE]\n\n data: {"error" "finish_reason":"abort" \r\n0\r\n\r\n'
"""What a model might write to confuse a relay."""


SIZES = [b"+%x", b"0x%x", b"0X%x", b" %x", b"\t%x", b"\r\n%x", b"\n%x", b"0_%x", b"-%x", b"%xg", b"g%x"]
"""Not hexadecimal digits alone, though int() takes most of them."""


@pytest.mark.parametrize("odd", SIZES)
@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("way", [None, FailoverMode.REPLAY, FailoverMode.CONTINUE])
def test_a_chunk_whose_size_is_not_of_hexadecimal_digits_alone_is_malformed(
        odd: bytes, framed: bool, way: FailoverMode | None) -> None:
    event = (b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,'
             b'"finish_reason":null,"token_ids":[1],"prompt_token_ids":%b}]}\n\n')
    first, later = event % b"[7]", event % b"null"
    good = chunk_of(later)
    wrong = good.replace(b"%x" % len(later), odd % len(later), 1)
    for together in (True, False):
        stream = stream_of(None if way is None else Position("completions", way), framed=framed)
        reads = [chunk_of(first), good + wrong + good] if together else [chunk_of(first), good, wrong + good]
        out = b"".join(map(stream.feed, reads))
        assert (stream.kind, bool(stream.failure), stream.ended) == (FailureKind.BROKEN, True, False), out
        assert out.count(b'"text":"a"') == 2, "what came before it is relayed, and nothing behind it"


@pytest.mark.parametrize("number", [b"9223372036854775808", b"18446744073709551616", b"-1"])
@pytest.mark.parametrize("asked_ids", [True, False])
def test_an_event_whose_token_ids_cannot_be_kept_is_broken_and_no_exception(number: bytes, asked_ids: bool) -> None:
    stream = stream_of(Position("completions", FailoverMode.CONTINUE, asked_ids=asked_ids), framed=True)
    event = b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a","token_ids":[%b]}]}\n\n' % number
    assert stream.feed(chunk_of(event)) == b""
    assert stream.kind is FailureKind.BROKEN
    assert "cannot be read" in stream.failure


def test_a_prompt_whose_ids_the_engine_has_not_told_has_an_unknown_length() -> None:
    position = Position("completions", FailoverMode.CONTINUE)
    event = b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a","token_ids":[1]%b}]}\n\n'
    stream = stream_of(position, framed=True)
    stream.feed(chunk_of(event % b""))
    assert position.prompt_tokens == -1, "it is not measured as one of no tokens"
    told = Position("completions", FailoverMode.CONTINUE)
    stream_of(told, framed=True).feed(chunk_of(event % b',"prompt_token_ids":[7,8,9]'))
    assert told.prompt_tokens == 3


@pytest.mark.parametrize("ids", [b"-1", b"1.5", b'"a"', b"1e3"])
@pytest.mark.parametrize("reason", [b"null", b'"stop"'])
@pytest.mark.parametrize("framed", [True, False])
def test_an_event_like_those_before_whose_ids_are_no_numbers_is_broken(ids: bytes, reason: bytes, framed: bool) -> None:
    event = (b'data: {"id":"c","created":1,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,'
             b'"finish_reason":%b,"token_ids":[%b]%b}]}\n\n')
    position = Position("completions", FailoverMode.CONTINUE)
    stream = stream_of(position, framed=framed)
    for data in (event % (b"null", b"1", b',"prompt_token_ids":[7]'), event % (b"null", b"2", b',"prompt_token_ids":null'),
                 event % (reason, ids, b',"prompt_token_ids":null')):
        out = stream.feed(chunk_of(data))
    assert (out, stream.kind) == (b"", FailureKind.BROKEN)
    assert list(position.have().ids[0]) == [1, 2]


def run(parts: Iterable[bytes], *, framed: bool = True) -> tuple[bytes, EventStream]:
    stream = EventStream(framed=framed)
    return b"".join(stream.feed(part) for part in parts), stream


def pieces(raw: bytes, size: int) -> list[bytes]:
    return [raw[at:at + size] for at in range(0, len(raw), size)]


GOOD = [token("a"), token(NASTY), token("b" * 300), token("c", "stop"), DONE]


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 16, 61, 200, 10_000])
def test_a_good_stream_is_relayed_byte_for_byte_however_it_is_read(size: int, framed: bool) -> None:
    raw = b"".join(chunk_of(event) for event in GOOD)
    out, stream = run(pieces(raw + END, size), framed=framed)
    assert out == (raw if framed else b"".join(GOOD))
    assert (stream.ended, stream.done, stream.failure) == (True, True, "")


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_read_of_whole_chunks_takes_the_short_way(framed: bool, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EventStream, "_feed_carefully", lambda *_: pytest.fail("the careful way"))
    read = chunk_of(token(NASTY)) * count
    out = EventStream(framed=framed).feed(read)
    assert out == (read if framed else token(NASTY) * count)
    if framed:
        assert out is read, "no copy"


@pytest.mark.parametrize("framed", [True, False])
def test_after_whole_chunks_in_a_read_only_the_rest_takes_the_careful_way(framed: bool) -> None:
    stream = EventStream(framed=framed)
    whole, half = chunk_of(token("a")) * 3, chunk_of(token("b"))
    assert stream.feed(whole + half[:20]) == (whole if framed else token("a") * 3)
    assert stream.feed(half[20:]) == (half if framed else token("b"))
    assert stream.feed(whole) == (whole if framed else token("a") * 3)
    assert stream.feed(chunk_of(token("c")) + chunk_of(DONE) + END) == (
        chunk_of(token("c")) + chunk_of(DONE) if framed else token("c") + DONE)
    assert stream.ended
    assert stream.done


@pytest.mark.parametrize("bad",
                         [error(500), error(None), error("x"), b"data: {\"error\": oops}\n\n", token("held", "abort")])
@pytest.mark.parametrize("size", [1, 4, 50, 10_000])
def test_what_comes_after_a_failure_is_never_relayed(bad: bytes, size: int) -> None:
    good = chunk_of(token("a")) + chunk_of(token("b"))
    raw = good + chunk_of(bad) + chunk_of(DONE) + END
    out, stream = run(pieces(raw, size))
    assert out == good
    assert stream.failure
    assert not stream.ended


@pytest.mark.parametrize("bad", [error(500), token("held", "abort")])
def test_a_failure_as_a_read_of_its_own(bad: bytes) -> None:
    out, stream = run([chunk_of(token("a")), chunk_of(bad), chunk_of(DONE), END])
    assert out == chunk_of(token("a"))
    assert "died" in stream.failure or "aborted" in stream.failure


def test_an_error_that_is_the_clients_goes_on_as_it_is() -> None:
    raw = chunk_of(error(400, "token id 99 is out of vocabulary")) + chunk_of(DONE)
    out, stream = run([raw + END])
    assert b"out of vocabulary" in out
    assert (stream.ended, stream.failure) == (True, "")


def test_events_and_chunks_need_not_fall_together() -> None:
    events = token("a") + token("b") + DONE
    raw = chunk_of(events[:10]) + chunk_of(events[10:70]) + chunk_of(events[70:])
    out, stream = run([*pieces(raw, 9), END], framed=False)
    assert out == events
    assert stream.ended


def test_events_in_one_chunk_with_a_failure_between_them() -> None:
    out, stream = run([chunk_of(token("a") + error(500) + token("b"))], framed=False)
    assert out == token("a")
    assert stream.failure == "the engine reported an error: it died"
    out, _ = run([chunk_of(token("a") + error(500) + token("b"))])
    assert out == chunk_of(token("a"))


def test_only_whole_events_are_relayed() -> None:
    stream = EventStream(framed=False)
    assert stream.feed(chunk_of(b'data: {"choices":')) == b""
    assert stream.feed(chunk_of(b"[]}\n")) == b""
    assert stream.feed(chunk_of(b"\n")) == b'data: {"choices":[]}\n\n'


def test_comments_and_crlf_are_events_too() -> None:
    raw = chunk_of(b": keep-alive\n\n") + chunk_of(b'data: {"a":1}\r\n\r\n') + chunk_of(DONE)
    out, stream = run([raw + END])
    assert out == raw
    assert stream.ended


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize(("payloads", "alone"), [
    ([b": keep-alive\n\n"], True), ([b":\n\n", b": a\n: b\n\n"], True), ([b"\n\n", b": a\r\n\r\n"], True),
    ([b": a\n\n", b"data: {}\n\n"], False), ([b"data: {}\n\n"], False), ([b": a\ndata: {}\n\n"], False),
    ([b"data: :\n\n", b": a\n\n"], False), ([b"event: x\n\n"], False)])
def test_comments_alone_are_told_from_events(payloads: list[bytes], alone: bool, framed: bool) -> None:
    out = b"".join(chunk_of(payload) if framed else payload for payload in payloads)
    assert only_comments(out, framed=framed) is alone


@pytest.mark.parametrize("way", [None, FailoverMode.REPLAY, FailoverMode.CONTINUE])
def test_a_comment_hides_nothing_of_the_event_that_it_stands_in(way: FailoverMode | None) -> None:
    position = None if way is None else Position("completions", way)
    stream = stream_of(position, framed=False)
    told = b'data: {"id":"x","choices":[{"index":0,"text":"a","token_ids":[1]}],"prompt_token_ids":[7]}\n'
    out = stream.feed(chunk_of(b": one\n" + told + b": two\n\n"))
    assert out.startswith(b": one\n")
    assert (b'"token_ids":[1]' in out) is (way is not FailoverMode.CONTINUE)
    if way is FailoverMode.CONTINUE:
        assert position is not None
        assert (position.prompt, position.tokens) == (b"7", 1)
    assert stream.feed(chunk_of(b": c\n" + error(500, "gone"))) == b": c\n\n"
    assert stream.failure.endswith("gone")


def test_a_body_may_end_without_done() -> None:
    _, stream = run([chunk_of(token("a")), END])
    assert (stream.done, stream.ended) == (True, False)


@pytest.mark.parametrize("bad", [b"zz\r\n", b"5\r\ndata: {\"a\"}\n\n\r\n"])
def test_malformed_framing_ends_it_behind_what_was_good(bad: bytes) -> None:
    good = chunk_of(token("a"))
    out, stream = run([good + bad, good])
    assert out == good
    assert (stream.kind, stream.failure[:15]) == (FailureKind.BROKEN, "the engine sent")


def test_an_event_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xpyd_sidecar.router.stream.events.MAX_EVENT", 1000)
    _, stream = run([chunk_of(b"data: x") for _ in range(200)])
    assert "an event of more" in stream.failure


def chat(delta: str, ids: str, more: str = "", behind: str = "") -> bytes:
    choice = (f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":null{more},"token_ids":{ids}}}')
    return f'data: {{"id":"c","created":1,"model":"m","choices":[{choice}]{behind}}}\n\n'.encode()


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("size", [1, 7, 10_000, 0])
def test_a_stream_that_is_unlike_the_one_before_is_learned_anew(framed: bool, size: int) -> None:
    for more in ("", ',"stop_reason":null', ""):  # what is guessed from the stream before is wrong
        role = chat('{"role":"assistant","content":""}', "null", more, ',"prompt_token_ids":[7,8]')
        events = [role, *(chat(f'{{"content":" t{i}"}}', f"[{i}]", more) for i in range(4)), DONE]
        position = Position("chat", FailoverMode.CONTINUE)
        stream = stream_of(position, framed=framed)
        raw = [chunk_of(event) for event in events[:-1]] + [chunk_of(DONE) + END]
        out = b"".join(map(stream.feed, pieces(b"".join(raw), size) if size else raw))
        shown = [re.sub(rb'"(prompt_)?token_ids":\[[0-9,]+\]', lambda m: m[0].split(b"[")[0] + b"null", event)
                 for event in events]
        assert out == b"".join(chunk_of(event) if framed else event for event in shown)
        assert (stream.ended, stream.done, stream.failure) == (True, True, "")
        assert (position.tokens, position.prompt_tokens) == (4, 2)
        assert position.have().texts == {(0, "content"): " t0 t1 t2 t3"}


@pytest.mark.parametrize("ends", [1, 2, 3, 4, 6, 7])
def test_the_last_writes_of_a_stream_take_the_short_way_however_many_are_read_at_once(
        ends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    events = [chat('{"role":"assistant","content":""}', "null", "", ',"prompt_token_ids":[7,8]'),
              *(chat(f'{{"content":" t{i}"}}', f"[{i}]") for i in range(3))]
    last = chat('{"content":" end"}', "[9]").replace(b'"finish_reason":null', b'"finish_reason":"stop"')
    monkeypatch.setattr(EventStream, "_feed_carefully", lambda *_: pytest.fail("the careful way"))
    raw = [*map(chunk_of, events), chunk_of(last), chunk_of(DONE), END]
    for some in ([*raw[:-ends], b"".join(raw[-ends:])], [*raw[:-ends - 1], b"".join(raw[-ends - 1:-1]), END]):
        position = Position("chat", FailoverMode.CONTINUE)
        stream = stream_of(position, framed=True)
        out = b"".join(map(stream.feed, some))
        assert out.endswith(chunk_of(DONE))
        assert (stream.ended, stream.done, stream.failure, position.tokens) == (True, True, "", 4)


@pytest.mark.parametrize("size", [1, 64, 4096])
def test_what_events_say_of_their_time_is_the_engines_however_they_differ(size: int) -> None:
    event = (b'data: {"id":"c","object":"x",%b"model":"m","choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,'
             b'"finish_reason":null,"token_ids":%b}]%b}\n\n')
    events = [event % (b"", b"null", b',"prompt_token_ids":[7]')]
    events += [event % (b'"created":%d,' % time, b"[8]", b"") for time in (1, 1, 2, 2)]
    reads = [piece for one in events for piece in pieces(chunk_of(one), size)]
    stream, out = stream_of(Position("chat", FailoverMode.CONTINUE), framed=True), b""
    for read in reads:
        some, end = stream.quick(read) or (b"", 0)
        out += some + stream.feed(read[end:])
    assert [int(one) for one in re.findall(rb'"created":(\d)', out)] == [1, 1, 2, 2]


@pytest.mark.parametrize("behind", [b"5\r\nhello\r\n", b"HTTP/1.1 200 OK\r\n", b"0\r\nx: y\r\n"])
def test_bytes_behind_the_end_of_a_stream_are_not_taken_for_the_end_of_its_body(behind: bytes) -> None:
    """The connection would serve another request while some of this answer is still to come."""
    stream = EventStream(framed=True)
    stream.feed(chunk_of(token("a", "stop")))
    assert stream.feed(chunk_of(DONE)) == chunk_of(DONE)
    assert stream.feed(behind) == b""
    assert (stream.ended or bool(stream.failure), stream.done) == (True, False)
