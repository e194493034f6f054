"""How a session begins: each end shows that it holds the service's ``data`` key, and both have keys that seal the rest.

    P ── CHALLENGE ─▶ D        P ◀─ HELLO (what D is, and its proof) ── D        sealed from here on

The order of messages, what the proof covers and the keys are drawn in ``kv.session_keys``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn, TypeVar

import msgspec

from xpyd_sidecar.contract.ids import Incarnation, InstanceName
from xpyd_sidecar.errors import AuthError, Incompatible, PeerError, ProtocolError
from xpyd_sidecar.kv import session_keys
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.kv.messages import MessageError
from xpyd_sidecar.kv.session_keys import PrivateKey, Sealing, SessionKeys, Transcript
from xpyd_sidecar.kv.wire import NO_TRY, Frame, FrameKind
from xpyd_sidecar.session.control_connection import ControlConnection


class Challenge(msgspec.Struct, frozen=True):
    """Body of a CHALLENGE frame."""

    incarnation: Incarnation
    """Of prefill's rank."""
    public: bytes
    """A key made for this session."""


class HelloTerms(msgspec.Struct, frozen=True):
    """What decode says of itself."""

    instance: InstanceName
    incarnation: Incarnation
    expects: Incarnation
    """The life of prefill's rank that it means."""
    rank: int
    public: bytes


class SessionHello(msgspec.Struct, frozen=True):
    """Body of HELLO: ``HelloTerms`` as they were encoded, and the proof of all that was said up to them."""

    terms: bytes
    proof: bytes


class Rejection(msgspec.Struct, frozen=True):
    """Body of a REJECT frame."""

    outcome: Outcome
    reason: str


T = TypeVar("T")
_CHALLENGE = msgspec.msgpack.Decoder(Challenge)
_HELLO = msgspec.msgpack.Decoder(SessionHello)
_TERMS = msgspec.msgpack.Decoder(HelloTerms)
_REJECTION = msgspec.msgpack.Decoder(Rejection)


class RankRejected(Incompatible):
    """Prefill refuses this rank, with its reason."""

    def __init__(self, peer: str, why: Rejection) -> None:
        super().__init__(peer, why.reason)
        self.outcome = why.outcome


class OwnRank(NamedTuple):
    """Who this end is."""

    instance: InstanceName
    incarnation: Incarnation
    rank: int
    data_key: bytes
    """Derived from the service key."""


class PrefillGreeting:
    """Prefill's half. ``terms`` and ``keys``: of decode and of the session, once it has shown that it holds the key."""

    def __init__(self, me: OwnRank, link: ControlConnection) -> None:
        self.terms: HelloTerms | None = None
        self.keys: SessionKeys | None = None
        self._me = me
        self._link = link
        self._private = PrivateKey()
        self._said = Transcript()
        self._said.add(link.send(FrameKind.CHALLENGE, Challenge(me.incarnation, self._private.public)))

    def on_frame(self, frame: Frame) -> HelloTerms:
        """Decode's first word: who it is.

        Raises:
            AuthError: it does not hold the service key.
            Incompatible: it means another life of this rank. Both are told to decode first.
            ProtocolError, MessageError: it says something else.
        """
        peer, me = self._link.peer, self._me
        if frame.kind is not FrameKind.HELLO or frame.key != NO_TRY:
            raise ProtocolError(peer, f"sent {frame.kind.name} before HELLO")
        hello = _read(_HELLO.decode, frame.body)
        self._said.add(hello.terms)
        if not session_keys.holds(me.data_key, self._said, hello.proof):
            self._refuse(Outcome.AUTH, AuthError(peer, "does not hold the service key"))
        terms = _read(_TERMS.decode, hello.terms)
        self._link.peer = f"{terms.instance} ({peer})"
        self.keys = _keys(self._link, self._private, terms.public, me.data_key, self._said)
        self._link.seal(Sealing(self.keys.of_prefill), Sealing(self.keys.of_decode))
        if terms.expects != me.incarnation:
            reason = f"incarnation {terms.expects} is gone, {me.incarnation} is here"
            self._refuse(Outcome.INCARNATION, Incompatible(self._link.peer, reason))
        self.terms = terms
        return terms

    def _refuse(self, outcome: Outcome, error: PeerError) -> NoReturn:
        self._link.send(FrameKind.REJECT, Rejection(outcome, error.reason))
        raise error


class DecodeGreeting:
    """Decode's half. ``keys``: of the session, once prefill has challenged."""

    def __init__(self, me: OwnRank, link: ControlConnection, expects: Incarnation) -> None:
        """``expects``: the life of prefill's rank that is meant."""
        self.keys: SessionKeys | None = None
        self._me = me
        self._link = link
        self._expects = expects

    def on_frame(self, frame: Frame) -> None:
        """Prefill's first word: answer it. What follows is sealed, and only who holds the service key can go on.

        Raises:
            ProtocolError, MessageError: it says something else.
        """
        me, link = self._me, self._link
        if frame.kind is not FrameKind.CHALLENGE or frame.key != NO_TRY:
            raise ProtocolError(link.peer, f"sent {frame.kind.name} before CHALLENGE")
        challenge = _read(_CHALLENGE.decode, frame.body)
        private, said = PrivateKey(), Transcript()
        terms = msgspec.msgpack.encode(HelloTerms(me.instance, me.incarnation, self._expects, me.rank, private.public))
        for words in (frame.body, terms):
            said.add(words)
        link.send(FrameKind.HELLO, SessionHello(terms, session_keys.prove(me.data_key, said)))
        self.keys = _keys(link, private, challenge.public, me.data_key, said)
        link.seal(Sealing(self.keys.of_decode), Sealing(self.keys.of_prefill))


def rejection_of(peer: str, body: bytes) -> RankRejected:
    """The error that a REJECT stands for.

    Raises:
        MessageError: it says something else.
    """
    return RankRejected(peer, _read(_REJECTION.decode, body))


def _keys(link: ControlConnection, private: PrivateKey, public: bytes, data_key: bytes, said: Transcript) -> SessionKeys:
    try:
        return session_keys.derive(private.shared_secret(public), data_key, said)
    except ValueError as error:
        raise ProtocolError(link.peer, f"no public key: {error}") from None


def _read(decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(str(error)) from None
