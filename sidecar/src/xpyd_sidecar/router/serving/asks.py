"""What a request that is served asks of engines: the difference between a completion, a dialect and any other path.

The two forms are ``generation.Generation`` (completions and chats, whose streams the router reads) and
``passthrough.Passthrough`` (everything else, whose answers pass through). All else about a request is the same for both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from msgspec import Raw

from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.router.api.bodies import GenerationRequest, RequestHash, hash_of
from xpyd_sidecar.router.api.faults import HttpFault
from xpyd_sidecar.router.fleet.member import EngineTarget
from xpyd_sidecar.router.serving import instructions as mv
from xpyd_sidecar.router.stream.events import EventStream
from xpyd_sidecar.router.stream.replay_recorder import FirstToken
from xpyd_sidecar.router.upstream.call import BodySender

Headers = list[tuple[bytes, bytes]]
Asked = tuple[bytes, bytes]
"""The request id and the body of a leg."""
Later = Callable[[bytes], Asked]
"""The same of a leg that is asked when prefill has answered: of its answer."""


class GoesOn(mv.Course, Protocol):
    """An answer that may go on elsewhere, for who carries that out."""

    def refused(self) -> None:
        """An engine answered 4xx."""

    def resume(self) -> tuple[str, int]:
        """It goes on elsewhere: in which way, and how many tokens the client has."""

    def spoken(self, token: FirstToken, streams: Iterable[EventStream | None]) -> None:
        """Prefill's token goes to the client; ``streams`` read the other legs."""


class Asks(ABC):
    """Of one request."""

    skips: str = ""
    """Why it goes without prefill: a field, or a rule; empty where it does not, or never would."""
    api: str = ""
    """The name of its API where it generates; empty where it does not, and then it is no generation request."""
    path: str = ""
    """Its path, of the router's table, where its answer passes through; else empty."""
    stream: bool = False
    """Whether its answer is to come in events."""
    once: bool = False
    """Whether its body can be sent to one engine alone."""
    opaque: bool = False
    """Whether nobody but its client knows what its answer means: an error event cannot be put behind it."""
    speaks: bool = False
    """Whether the client gets prefill's token."""
    prompt: Raw = Raw(b"")
    """As the client wrote it; empty where there is none."""
    passed_on: tuple[bytes, ...]
    """Names of the client's headers that engines read."""
    _hash: RequestHash | None = None

    def __init__(self, kind: str, model: str | None, fields: Mapping[str, Raw]) -> None:
        """``fields``: of its JSON body, as the client wrote them, and ``model`` the one they name. ``kind``: what makes
        its hash together with them.
        """
        self.model = model
        self.fields = fields
        self._kind = kind

    @property
    def generates(self) -> GenerationRequest | None:
        """The completion or chat that it is; None: it is neither."""
        return None

    @property
    def alone(self) -> bool:
        """Whether decode does all of it."""
        return bool(self.skips)

    @property
    def unread(self) -> bool:
        """Whether part of its body has not come, so that the next request cannot be found behind it."""
        return False

    @property
    def course(self) -> GoesOn | None:
        """What the client has of an answer that may go on elsewhere; None where it cannot."""
        return None

    def request_hash(self) -> RequestHash:
        """Equal for all requests that ask for the same work. Made when it is needed."""
        if self._hash is None:
            self._hash = hash_of(self._kind, self.fields)
        return self._hash

    @abstractmethod
    def leg(self, send: mv.SendAttempt, request_id: bytes, *, speaks: bool) -> Asked | Later:
        """The request id and the body of a leg; or what makes them of prefill's answer, where they need it.

        ``speaks``: prefill's token goes to the client.
        """

    @abstractmethod
    def message(self, target: EngineTarget, headers: Headers, body: bytes) -> bytes:
        """The whole HTTP request of a leg; its head alone, where ``body`` has a sender."""

    def body(self, refuse: Callable[[HttpFault], None]) -> BodySender | None:  # noqa: ARG002 (a form's alone)
        """Who sends the body of the next leg while it comes; None: it is in the message. ``refuse`` hears what is wrong."""
        return None

    @abstractmethod
    def reader(self, role: Role, *, framed: bool, speaks: bool) -> EventStream | None:
        """What reads the answer of the next leg; None where it is wanted whole."""

    def failure(self) -> str:
        """What an engine says in an answer, which is whole, of its failure; empty where it says none."""
        return ""

    @abstractmethod
    def lengths(self) -> tuple[int, int] | None:
        """``(prompt tokens, generated tokens)`` of what was relayed; None where nothing was read of it."""
