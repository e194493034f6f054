"""Where a request has its prompt, and whether one is there: what starts instances must ask them for something. Pure.

Nothing is decoded: a value is judged by how it begins. Whether all of it is right only an engine knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from re import compile as regex
from typing import Final

from msgspec import Raw

_TEXT: Final = r'"(?!")'
_LIST: Final = r"\[\s*[^\]\s]"
_OBJECT: Final = r"\{\s*[^}\s]"
_WORDS = regex(rf"\s*(?:{_TEXT}|{_LIST})".encode())
_SEVERAL = regex(rf"\s*{_LIST}".encode())
_NAMED = regex(rf"\s*{_OBJECT}".encode())
_COMPLETION = (("prompt", _WORDS), ("prompt_embeds", _WORDS))
_CHAT = (("messages", _SEVERAL),)
_FIELDS: Final = {
    "completions": _COMPLETION, "chat": _CHAT, "messages": _CHAT, "responses": (("input", _WORDS),),
    "/v1/chat/completions/batch": _CHAT, "/cohere/v2/chat": _CHAT, "/invocations": (*_COMPLETION, *_CHAT),
    "/inference/v1/generate": (("token_ids", _SEVERAL),), "/v1/systemone": (("questions", _NAMED),),
}
"""By the API, or by the path of what has none: any of these, where it has something in it."""


def has_prompt(api: str, path: str, fields: Mapping[str, Raw]) -> bool:
    """Whether a request asks for something: a text, a list or questions that are not empty.

    Args:
        api: what metrics call it; empty where it has no name.
        path: of the router's table.
        fields: of its JSON body, as the client wrote them.
    """
    return any(name in fields and form.match(fields[name]) is not None for name, form in _FIELDS.get(api or path, ()))
