"""What another engine is asked, so that a stream goes on behind what the client has.

    client has   p r o m p t │ t1 t2 t3 t4 t5          t4: the last clean token
    asked        p r o m p t   t1 t2 t3 t4 │           (completions: as the prompt; chat: as kv_transfer_params)
    comes back                             │ t5 t6 …   t5 is compared and dropped

**Stop strings** make text lag: an engine holds back L = (longest stop string - 1) characters. Let S characters be sent, of
them s(c) when clean token c came; the text behind c is s(c) + L long, and the other engine starts to speak there. So c must
have s(c) + L ≤ S, and S - s(c) - L characters come twice. With include_stop_str_in_output nothing is held back, but a stop
string that began before c would be missed: c must have s(c) ≤ S - L. Every match that begins before S was looked for.

**Sampled streams** are cut behind the last id that came, wherever that is. A cut at the last clean token would draw the
tokens behind it again, and which those are depends on them: characters of several tokens would become rarer. Where the last
id is inside a character the other engine tells more text than its own (``Seam``).
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import msgspec
from msgspec import Raw

from xpyd_sidecar.router.api.bodies import GenerationRequest
from xpyd_sidecar.router.api.failover_modes import (
    EXACT_ALONE,
    UNTOLD,
    EngineDefaults,
    FailoverMode,
    SamplingTerms,
    goes_on_sampled,
    one_choice,
    way_if_greedy,
    way_of,
)
from xpyd_sidecar.router.api.fields import integer_of, is_null, is_true
from xpyd_sidecar.router.stream.position import Channel, Have, Position

COMPLETIONS_MAX_TOKENS = 16
"""Of /v1/completions where max_tokens is absent (OpenAI's and vLLM's default)."""
MAX_STOP = 64 << 10
"""Bytes of stop strings that are read."""
_TRUE = Raw(b"true")


MAX_NEW: Final = 32
"""Characters that the tokens from the seam to the first whole character may have."""
MAX_PLAIN: Final = 256
"""Characters of a first text that is only new."""
MIN_KNOWN: Final = 8
"""Characters before the seam that must be known: fewer may stand anywhere."""


class Seam:
    """Where a stream goes on inside a character: what the client has, as the other engine will say it again.

    An engine gives text when a character is whole. One whose prompt ends inside a character has nothing to begin from, and
    gives the text of its whole prompt with the first character that it completes (vLLM ``v1/engine/detokenizer.py``):

        prompt's ids              p r o m p t   g e n e r a t e d   ½
        the client has                          G
        ids that are drawn                                            ½   …
        the first text            P             G                   日     the part behind G is new

    P is known only where the client sent it as text, and even then a tokenizer may give it back otherwise; G is known. So
    the new part is what stands behind G, at the end of that text, if there is one such place alone.
    """

    __slots__ = ("_inside", "_known")

    def __init__(self, whole: str, said: str, *, inside: bool) -> None:
        """``said``: what the client has; ``whole``: with the prompt's text before it, where that is known.

        ``inside``: the last id had no text, so it is inside a character. Else several came at once, and it may be.
        """
        self._known = tuple(dict.fromkeys(one for one in (whole, said) if len(one) >= MIN_KNOWN))
        self._inside = inside

    def own(self, channel: str, text: str) -> str | None:
        """The new part of the first text; None where it cannot be told."""
        if channel not in {"text", "content"}:
            return None
        for known in self._known:
            places = [at for at in range(max(0, len(text) - MAX_NEW), len(text)) if text.endswith(known, 0, at)]
            if places:
                return text[places[0]:] if len(places) == 1 else None
        return None if self._inside or len(text) > MAX_PLAIN else text


NOWHERE: Final = Seam("", "", inside=True)
"""Nothing can be told."""


class _Options(msgspec.Struct):
    """What is read of ``stream_options``; other names are not built."""

    include_usage: Raw = Raw(b"")
    continuous_usage_stats: Raw = Raw(b"")


class Going(msgspec.Struct, frozen=True):
    """How a stream goes on."""

    request: GenerationRequest
    keep: int
    """Generated tokens that are part of the prompt now; 0: a replay."""
    prompt: bytes
    """The ids that the engine must say it was given (JSON without brackets); empty: any."""
    texts: dict[Channel, str]
    """What comes again and must be equal, by channel."""
    ids: dict[int, array[int]]
    """The same as token ids, by choice."""
    logprobs: dict[int, int]
    """Entries of log probabilities that come again, by choice."""
    seam: Seam | None = None
    """The prompt ends inside a character, or may."""
    counts: bool = True
    """It is another engine that goes on; not decode behind prefill's token."""


def position_of(request: GenerationRequest, *, goes_on: bool, terms: SamplingTerms = EXACT_ALONE) -> Position | None:
    """Where a client that has nothing yet is; None where its stream cannot, or shall not, be followed.

    A sampled stream that does not go on elsewhere has its tokens counted: by ids, or by the usage that its client asks for.
    """
    if not goes_on or not request.stream:
        return None
    fields = request.fields
    wants_usage = is_true(_options(request).include_usage)
    way = way_of(request.api, fields, terms.told)
    sampled = way is FailoverMode.ERROR and terms.sampled and goes_on_sampled(request.api, fields, terms.told)
    lasts = sampled or way is not FailoverMode.ERROR
    if sampled:
        way = FailoverMode.CONTINUE
    elif not lasts:
        way = way_if_greedy(request.api, fields)
        if way is not FailoverMode.CONTINUE and not wants_usage:
            return None
    return Position(request.api, way, asked_ids=is_true(fields.get("return_token_ids")),
                    wants_usage=wants_usage, choices=1 if one_choice(fields) else 0,
                    shows_logprobs=_given(fields.get("logprobs")), lasts=lasts, sampled=sampled)


def first_request(request: GenerationRequest, position: Position | None) -> GenerationRequest:
    """The request as its first decode leg asks it: with token ids where the stream can go on from them."""
    if position is None or position.way is not FailoverMode.CONTINUE or position.asked_ids:
        return request
    return msgspec.structs.replace(request, fields={**request.fields, "return_token_ids": _TRUE})


def speaks_first(request: GenerationRequest, position: Position | None) -> bool:
    """Whether the token that prefill sampled can be shown: decode's first one is provably the same, and alike.

    Greedy, by the table of ways. Not with stop strings (text lags), log probabilities or token ids (they would have to be
    equal too), nor where the answer may be that one token.
    """
    if (position is None or not position.lasts or position.sampled or position.way is not FailoverMode.CONTINUE
            or position.asked_ids or position.shows_logprobs):
        return False
    fields = request.fields
    if _given(fields.get("stop")) or is_true(_options(request).continuous_usage_stats):
        return False
    return all(integer_of(fields[name]) != 1 for name in ("max_tokens", "max_completion_tokens") if name in fields)


def may_go_on(request: GenerationRequest, position: Position, begun: SamplingTerms, now: SamplingTerms) -> bool:
    """Whether a stream that began on the terms ``begun`` can go on elsewhere; noted where it must be run again for it."""
    if not position.goes_on:
        return False
    if position.sampled:
        return (now.sampled and now.told == begun.told and _room(request, position, now.told)
                and (not position.log or _seam(request, position.have()) is not NOWHERE))
    if begun is not now and way_of(request.api, request.fields, now.told) is not FailoverMode.CONTINUE:
        position.forgets = True
    return True


def go_on(request: GenerationRequest, position: Position, told: EngineDefaults = UNTOLD) -> Going:
    """How ``request`` goes on behind ``position``. ``told``: what engines add to it."""
    have = position.have()
    if position.sampled:
        cut: tuple[int, dict[Channel, str]] | None = (len(have.ids[0]), {}) if have.ids[0] else None
    else:
        cut = None if position.replays or not position.prompt else _cut(request, have)
    if cut is None:
        return replay(request, position)
    asked = first_request(request, position)
    keep, texts = cut
    ids = have.ids[0]
    generated = ",".join(map(str, ids[:keep])).encode()
    prompt = b"%b,%b" % (position.prompt, generated)
    # With log probabilities there is one entry a token.
    logprobs = {choice: len(ids) - keep for choice in have.logprobs}
    seam = _seam(request, have) if position.sampled else None
    assert seam is not NOWHERE, "a stream goes on that cannot"
    return Going(_behind(asked, keep, Raw(b"[%b]" % prompt), told), keep, prompt, texts, {0: ids[keep:]}, logprobs, seam)


def replay(request: GenerationRequest, position: Position, *, counts: bool = True) -> Going:
    """The same request from its start; what the client has comes again."""
    have = position.have()
    return Going(first_request(request, position), 0, b"", have.texts, have.ids, have.logprobs, counts=counts)


def _seam(request: GenerationRequest, have: Have) -> Seam | None:
    """What is to be done about a prompt that ends with all ids that came; NOWHERE: nothing can be."""
    if not have.steps or have.steps[-1][4]:
        return None
    if any(channel not in {"text", "content"} for _, channel in have.texts):
        return NOWHERE  # a parser stands between what the engine says and what is seen
    known = "".join(have.texts.values())
    prompt = _decoded(request.fields.get("prompt"), str) if request.api == "completions" else None
    before = len(have.steps) > 1 and have.steps[-2][0]
    inside = not have.steps[-1][3] and have.steps[-1][0] - before == 1
    whole_text = (prompt or "") + known
    return NOWHERE if inside and len(whole_text) < MIN_KNOWN else Seam(whole_text, known, inside=inside)


def _room(request: GenerationRequest, position: Position, told: EngineDefaults) -> bool:
    """Whether a token is left of those that it may have. If none is, its finish reason is missing, which nobody repeats."""
    limit = _limit(request, told)
    return limit is None or limit > position.log.count(b"\t")


def _limit(request: GenerationRequest, told: EngineDefaults) -> int | None:
    """Most tokens of the answer; None: as many as there is room for, or what cannot be read."""
    names = ("max_completion_tokens", "max_tokens") if request.api == "chat" else ("max_tokens",)
    given = next((request.fields[name] for name in names if _given(request.fields.get(name))), None)
    default = told.default("max_tokens")
    if given is not None:
        limit = integer_of(given)
    elif request.api == "completions" and "max_tokens" not in request.fields:
        limit = COMPLETIONS_MAX_TOKENS
    else:
        limit = None if default is None else int(default)
    bounds = [one for one in (limit, told.bound) if one]
    return min(bounds, default=None)


def _cut(request: GenerationRequest, have: Have) -> tuple[int, dict[Channel, str]] | None:
    """``(tokens to keep, text that comes again)``; None where no token is clean."""
    lag = _lag(request)
    if lag is None or (lag and len(have.texts) > 1):
        return None  # a parser stands between the text that lags and the text that is seen
    includes = is_true(request.fields.get("include_stop_str_in_output"))
    held = 0 if includes else lag
    bound = have.chars() - (lag if includes else 0)
    for at in range(len(have.steps) - 1, -1, -1):
        keep, chars, _, _, clean = have.steps[at]
        if clean and chars + held <= bound:
            texts: dict[Channel, str] = {}
            for _, _, channel, text, _ in have.steps[at + 1:]:
                if text:
                    texts[0, channel] = texts.get((0, channel), "") + text
            return keep, {channel: text[held:] for channel, text in texts.items()}
    return None


def _lag(request: GenerationRequest) -> int | None:
    """Longest stop string - 1, in characters; None where the field cannot be read, or is too long to be."""
    raw = request.fields.get("stop")
    if raw is None or is_null(raw):
        return 0
    stops = _decoded(raw, str | list[str]) if len(raw) <= MAX_STOP else None
    if stops is None:
        return None
    return max(map(len, [stops] if isinstance(stops, str) else stops), default=1) - 1


def _behind(request: GenerationRequest, keep: int, prompt: Raw, told: EngineDefaults) -> GenerationRequest:
    fields = dict(request.fields)
    fields.pop("truncate_prompt_tokens", None)  # the ids are what it left
    limit = _limit(request, told)
    counted = [name for name in ("max_tokens", "max_completion_tokens") if _given(fields.get(name))]
    for name in counted:
        fields[name] = _less(fields[name], keep, least=1)
    if limit is not None:  # also one that only the engine knew
        name = "max_completion_tokens" if request.api == "chat" and "max_completion_tokens" in counted else "max_tokens"
        fields[name] = Raw(b"%d" % max(limit - keep, 1))
    if _given(fields.get("min_tokens")):
        fields["min_tokens"] = _less(fields["min_tokens"], keep, least=0)
    if request.api == "chat":
        return msgspec.structs.replace(request, fields=fields, prompt_ids=prompt)
    fields["prompt"] = prompt
    return msgspec.structs.replace(request, fields=fields)


def _options(request: GenerationRequest) -> _Options:
    return _decoded(request.fields.get("stream_options"), _Options) or _Options()


def _less(raw: Raw, keep: int, least: int) -> Raw:
    number = integer_of(raw)
    return raw if number is None else Raw(b"%d" % max(least, number - keep))


def _given(raw: Raw | None) -> bool:
    return raw is not None and not is_null(raw) and bytes(raw) != b"false"


def _decoded(raw: Raw | None, kind: Any) -> Any:
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
