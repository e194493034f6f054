from __future__ import annotations

import os
import random
import shlex
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from fuzz.reads import LEARNED, Guess, to_learn
from scripts import load

from xpyd_sidecar.router.api.failover_modes import FailoverMode
from xpyd_sidecar.router.api.fields import Api
from xpyd_sidecar.router.http.wire import chunk_of
from xpyd_sidecar.router.relay import fast, plain
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.position import Position
from xpyd_sidecar.router.stream.replay_recorder import stream_of

ROOT = Path(__file__).resolve().parents[2]
OUTLETS = [plain.Outlet, fast.Outlet]
compiled = pytest.mark.skipif(not fast.COMPILED, reason="nothing was compiled here")
END = b"0\r\n\r\n"
DONE = chunk_of(b"data: [DONE]\n\n")


class Paper:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@pytest.mark.parametrize("kind", OUTLETS)
def test_what_the_socket_does_not_take_goes_to_the_transport_and_so_does_all_that_follows(kind: type[plain.Outlet]) -> None:
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        transport, outlet = Paper(), kind()
        outlet.open(transport, near.fileno())
        outlet.write(b"first")
        assert (far.recv(99), transport.data, outlet.direct, outlet.buffered) == (b"first", b"", True, False)
        much = random.Random(1).randbytes(4 << 20)
        outlet.write(much)
        outlet.write(b"behind it")
        assert (outlet.direct, outlet.buffered) == (False, True)
        near.close()
        taken = b"".join(iter(lambda: far.recv(1 << 20), b""))
    assert taken
    assert taken + transport.data == much + b"behind it"


@pytest.mark.parametrize("kind", OUTLETS)
def test_nothing_is_written_to_a_descriptor_after_the_outlet_was_shut(kind: type[plain.Outlet]) -> None:
    near, far = socket.socketpair()
    with near, far:
        transport, outlet = Paper(), kind()
        outlet.write(b"before there is a peer")
        outlet.open(transport, near.fileno())
        outlet.shut()
        outlet.write(b"too late")
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
    assert (transport.data, outlet.fd, outlet.direct) == (b"", -1, False)


@pytest.mark.parametrize("kind", OUTLETS)
def test_a_broken_connection_is_the_transports_to_find_out_and_encrypted_bytes_always_are(kind: type[plain.Outlet]) -> None:
    near, far = socket.socketpair()
    with near:
        far.close()
        transport, outlet = Paper(), kind()
        outlet.open(transport, near.fileno())
        outlet.write(b"lost")
        assert (transport.data, outlet.direct) == (b"lost", False)
        outlet.open(transport, -1)
        outlet.write(b", secret")
        assert transport.data == b"lost, secret"


def event(delta: str, ids: str, *, reason: str = "null", more: str = "", behind: str = "") -> bytes:
    choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}{more},"token_ids":{ids}}}'
    return chunk_of(f'data: {{"id":"c","created":1,"model":"m","choices":[{choice}]{behind}}}\n\n'.encode())


def made_up(dice: random.Random) -> bytes:
    """A stream as engines write it, with now and then an event that is unlike the others."""
    more = dice.choice(["", ',"stop_reason":null'])
    parts = [event('{"role":"assistant","content":""}', "null", more=more, behind=',"prompt_token_ids":[7,8]')]
    for number in range(dice.randrange(12)):
        word = dice.choice(["a", "\\n\\n", '\\"finish_reason\\":\\"abort\\"', "ü", "]", "data: [DONE]", "x" * 300, "}"])
        parts.append(dice.choices([
            event(f'{{"content":"{word}{number}"}}', f"[{number}]", more=more),
            event(f'{{"content":"{word}"}}', f"[{number},{number}]", more=more),
            event("{}", f"[{number}]", more=more),
            event(f'{{"content":"{word}"}}', "null", more=more),
            event(f'{{"content":"{word}"}}', "[]", more=more),
            event(f'{{"reasoning":"{word}"}}', f"[{number}]"),
            chunk_of(b": a comment\n\n"),
            event(f'{{"content":"{word}"}}', f"[{number}]", more=more, behind=',"usage":{"total_tokens":3}'),
            event("{}", "null", reason='"abort"'),
            chunk_of(b'data: {"error":{"message":"dead","code":500}}\n\n'),
            event(f'{{"content":"{word}"}}', f"[{number}]", more=more).replace(b"\r\n", b";x=1\r\n", 1),
            b"zz\r\n",
        ], [30, 4, 3, 2, 1, 2, 1, 1, 1, 1, 1, 1])[0])
    return b"".join([*parts, event('{"content":"."}', "[9]", reason='"stop"'), DONE, END])


def reads(raw: bytes, dice: random.Random) -> list[bytes]:
    """Mostly whole chunks, sometimes several, sometimes cut anywhere."""
    found, rest = [], raw
    while rest:
        at = rest.find(b"\n\n\r\n") + 4
        two = max(at, rest.find(b"\n\n\r\n", at) + 4)
        size = dice.choice([at, at, at, at, two, dice.randrange(1, 40)]) if at > 3 else len(rest)
        found.append(rest[:size])
        rest = rest[size:]
    return found


@compiled
@pytest.mark.parametrize("way", [FailoverMode.CONTINUE, FailoverMode.REPLAY, None])
def test_a_stream_read_by_shortcuts_reads_as_without_them(way: FailoverMode | None,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Same bytes to the client, same log, same end, whatever comes and however it is cut."""
    dice, taken = random.Random(7), 0
    for number in range(400):
        raw = made_up(dice)
        positions = [None if way is None else Position("chat", way) for _ in range(2)]
        quick, slow = (stream_of(position, framed=number % 5 != 0) for position in positions)
        some: list[tuple[bytes, bytes]] = []
        with monkeypatch.context() as without:
            without.setattr(EventStream, "quick", lambda *_: None)
            for read in reads(raw, dice) if number % 3 else [raw]:
                if slow.failure or slow.done:
                    break
                some.append((read, slow.feed(read)))
        for read, expected in some:
            short, end = (quick.quick(read) or (b"", 0)) if number % 2 else (b"", 0)
            taken += end == len(read)
            out = short if end == len(read) else short + quick.feed(read[end:])
            assert out == expected, read
        assert (quick.ended, quick.done, quick.failure, quick.kind) == (slow.ended, slow.done, slow.failure, slow.kind)
        if positions[0] is not None and positions[1] is not None:
            assert positions[0].log == positions[1].log
            assert positions[0].have() == positions[1].have()
    assert (taken > 150) == (way is not FailoverMode.REPLAY)


class Engine(fast.UpstreamReceiver):
    """A leg that writes down what no shortcut took."""

    def __init__(self) -> None:
        self.last_at = 0.0
        self.seen: list[bytes] = []

    def on_bytes(self, data: bytes) -> None:
        self.seen.append(data)


@compiled
def test_simple_events_go_from_a_leg_to_the_client_without_python_until_that_ends() -> None:
    near, far = socket.socketpair()
    good = chunk_of(b'data: {"id":"c"}\n\n')
    with near, far:
        far.settimeout(5)
        outlet, leg = fast.Outlet(), Engine()
        outlet.open(Paper(), near.fileno())
        leg.data_received(good)
        leg.relay(EventStream(framed=True), outlet)
        leg.data_received(good * 2)
        assert (far.recv(999), outlet.relayed, leg.last_at > 0) == (good * 2, 2 * len(good), True)
        leg.data_received(good[:-1])
        leg.data_received(good + DONE)
        leg.relay_no_more()
        leg.data_received(good)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
    assert leg.seen == [good, good[:-1], good + DONE, good]


@pytest.mark.unsanitized
def test_where_the_compiler_fails_it_is_said_and_what_was_compiled_before_stays(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hook = load(ROOT / "sidecar/hatch_build.py")
    made = [tmp_path / hook.made_of(source) for source in hook.SOURCES]
    for one in made:
        one.parent.mkdir(parents=True, exist_ok=True)
        one.write_bytes(b"of an older source")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert hook.compile_in(tmp_path).count("no-such-compiler") == len(made)
    for one in made:
        assert one.read_bytes() == b"of an older source", "a part of an older source is refused by its revision"
        assert {path.suffix for path in one.parent.iterdir()} == {".so"}, "what the compiler left unfinished is gone"


@compiled
@pytest.mark.unsanitized
def test_every_source_compiles_without_a_warning(tmp_path: Path) -> None:
    """What is a warning today is an error of a later compiler, and then nothing would be compiled there."""
    hook = load(ROOT / "sidecar/hatch_build.py")
    for source in hook.SOURCES:
        command = [*shlex.split(os.environ.get("CC") or "cc"), *hook.FLAGS, "-Werror", f"-I{sysconfig.get_path('include')}",
                   "-o", str(tmp_path / "made"), str(ROOT / "sidecar" / source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.unsanitized
def test_streams_are_served_and_go_on_elsewhere_without_shortcuts_too() -> None:
    """The tests of relaying, over Python's classes alone."""
    files = [f"tests/sockets/test_{part}.py" for part in ("router_failover", "upstream_pool")]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files], cwd=ROOT, check=False,
                          capture_output=True, text=True, env=os.environ | {"XPYD_PLAIN": "1"}, timeout=110)
    assert done.returncode == 0, done.stdout[-3000:]


@compiled
def test_a_scanner_learns_from_an_event_what_stands_around_its_text_and_ids() -> None:
    head = b'data: {"id":"c%d","object":"o","created":1,"model":"m","choices":[{"index":0,%b'
    texts = [b'"delta":{"role":"assistant","content":""},', b'"delta":{"content":"a [b]"},', b'"delta":{},', b'"text":"a",',
             b""]
    betweens = [b'"logprobs":null,"finish_reason":null,', b'"logprobs":null,"finish_reason":null,"stop_reason":null,',
                b'"logprobs":null,"finish_reason":"stop",', b'"logprobs":{"tokens":[1]},"finish_reason":null,', b""]
    ends = [b'"token_ids":[1]}]}', b'"token_ids":[1,2]}],"usage":null}', b'"token_ids":[1]}],"a name that is long":null}',
            b'"token_ids":null}]}', b'"token_ids":[1]}],"prompt_token_ids":[1,2,3]}', b'"x":1}],"prompt_token_ids":[7]}']
    dice = random.Random(3)
    learned = guessed = 0
    guesses: dict[Api, Guess | None] = {}
    for number in range(4000):
        api: Api = dice.choice(("chat", "completions"))
        event = head % (number, dice.choice(texts)) + dice.choice(betweens) + dice.choice(ends)
        if number < 2:  # both know what the stream before was like
            api = ("chat", "completions")[number]
            event = head % (number, texts[1 + 2 * number]) + betweens[0] + ends[0]
        log, scanner = bytearray(), fast.Scanner()
        guesses[api], expected = to_learn(api, event, guesses.get(api))
        before = dice.randbytes(3)
        found = scanner.learn(before + event + b"\n\n", 3, 3 + len(event), api == "chat", log)
        assert found == (expected is not None), event
        if found:
            assert tuple(getattr(scanner, name) for name in LEARNED) == expected, event
            assert (scanner._clean, scanner._framed, scanner._way) == (True, True, plain.NOTED)
            assert scanner._log is log
            says = to_learn(api, event, None)[1] is not None
            learned += says
            guessed += not says
    assert min(learned, guessed) > 50


@compiled
@pytest.mark.parametrize("wrong", [(b"abc", -1, 2), (b"abc", 2, 1), (b"abc", 0, 4)])
def test_an_event_outside_of_its_read_is_refused(wrong: tuple[bytes, int, int]) -> None:
    with pytest.raises(ValueError, match="outside"):
        fast.Scanner().learn(*wrong, True, bytearray())
