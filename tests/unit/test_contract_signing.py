"""Signed calls: taken once, by whom they are for, within a minute; and what is kept for that is bounded."""

from __future__ import annotations

import pytest

from xpyd_sidecar.contract import signing
from xpyd_sidecar.contract.signing import AWAY_S, KEPT_S, NONCES_MAX, CallVerifier, SignedCall, sign

KEY = b"k" * 32


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def receiver(clock: Clock) -> CallVerifier:
    return CallVerifier(KEY, "qwen-e0", clock)


def call(clock: Clock, *, key: bytes = KEY, method: str = "POST", path: str = "/role", instance: str = "qwen-e0",
         body: bytes = b"x", late_s: float = 0.0) -> str:
    return sign(key, SignedCall(method, path, instance, body), now=clock.now - late_s)


def test_a_call_is_taken_once(receiver: CallVerifier, clock: Clock) -> None:
    said = call(clock)
    assert receiver.refusal(said, "POST", "/role", b"x") == ""
    assert receiver.refusal(said, "POST", "/role", b"x") == "the call was taken already"
    assert receiver.refusal(call(clock), "POST", "/role", b"x") == "", "another one has another nonce"


@pytest.mark.parametrize("other", [
    {"key": b"j" * 32}, {"method": "GET"}, {"path": "/fleet"}, {"instance": "qwen-e1"}, {"body": b"y"}, {"body": b""},
])
def test_everything_of_a_call_is_signed(receiver: CallVerifier, clock: Clock, other: dict[str, str]) -> None:
    said = call(clock, **other)  # type: ignore[arg-type]
    assert "the signature is wrong" in receiver.refusal(said, "POST", "/role", b"x")


@pytest.mark.parametrize("late_s", [-AWAY_S, 0.0, AWAY_S])
def test_clocks_may_differ_by_a_minute(receiver: CallVerifier, clock: Clock, late_s: float) -> None:
    assert receiver.refusal(call(clock, late_s=late_s), "POST", "/role", b"x") == ""


@pytest.mark.parametrize("late_s", [-AWAY_S - 1, AWAY_S + 1, 10_000.0])
def test_what_is_older_or_from_the_future_is_refused(receiver: CallVerifier, clock: Clock, late_s: float) -> None:
    assert "are the clocks right?" in receiver.refusal(call(clock, late_s=late_s), "POST", "/role", b"x")


@pytest.mark.parametrize("late_s", [-AWAY_S, 0.0, AWAY_S])
def test_a_call_is_refused_for_as_long_as_its_time_is_good_and_then_by_its_time(
    receiver: CallVerifier, clock: Clock, late_s: float
) -> None:
    said, began = call(clock, late_s=late_s), clock.now
    assert receiver.refusal(said, "POST", "/role", b"x") == ""
    for after_s in range(1, 400):
        clock.now = began + after_s
        assert receiver.refusal(said, "POST", "/role", b"x") != ""


def test_nonces_are_bounded_and_forgotten(receiver: CallVerifier, clock: Clock) -> None:
    for _ in range(NONCES_MAX):
        assert receiver.refusal(call(clock), "POST", "/role", b"x") == ""
    assert "more than 4096 calls" in receiver.refusal(call(clock), "POST", "/role", b"x")
    clock.now += KEPT_S + 1
    assert receiver.refusal(call(clock), "POST", "/role", b"x") == ""
    assert len(receiver._seen) == 1


def test_a_stranger_fills_nothing(receiver: CallVerifier, clock: Clock) -> None:
    for _ in range(NONCES_MAX + 1):
        receiver.refusal(call(clock, key=b"j" * 32), "POST", "/role", b"x")
    assert receiver._seen == {}


def test_a_clock_that_is_set_back_locks_nobody_out_for_long(receiver: CallVerifier, clock: Clock) -> None:
    for _ in range(NONCES_MAX):
        receiver.refusal(call(clock), "POST", "/role", b"x")
    clock.now -= 10 * KEPT_S
    assert receiver.refusal(call(clock), "POST", "/role", b"x") == ""


@pytest.mark.parametrize("said", [
    "", "v1", "Bearer x", "v2 1 2 3", "v1 1 2 3", f"v1 1000000 {'a' * 32} {'b' * 63}", f"v1 1000000 {'A' * 32} {'b' * 64}",
    f"v1 -5 {'a' * 32} {'b' * 64}", f"v1 {'9' * 13} {'a' * 32} {'b' * 64}", f"v1 \u0661 {'a' * 32} {'b' * 64}",
    "\u00e9" * 200,
])
def test_other_forms_are_refused(receiver: CallVerifier, said: str) -> None:
    assert "has not the form" in receiver.refusal(said, "POST", "/role", b"x")


def test_the_form_never_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operator and sidecar of two versions speak to each other."""
    monkeypatch.setattr(signing.secrets, "token_hex", lambda count: "ab" * count)
    made = sign(KEY, SignedCall("GET", "/fleet", "qwen-e0"), now=1_700_000_000.9)
    assert made == f"v1 1700000000 {'ab' * 16} eafb64e4408df087e9a0969928222947739dada84d5330cc5a1197d33efee4cc"
