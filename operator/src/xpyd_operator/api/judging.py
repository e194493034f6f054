"""Arguments by which an engine judges requests: what is worth saying where prefill and decode have other ones.

Decode answers a request, so it has the last word; what prefill alone refuses is served by decode without prefill. That is
right, but slower, and mostly not what was meant. So it is a note of ``xpyd check``, not a fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from xpyd_operator.api import arguments
from xpyd_operator.api.service import DisaggService
from xpyd_operator.errors import Fault

JUDGING: Final = frozenset({
    "--chat-template", "--chat-template-content-format", "--enable-auto-tool-choice", "--enable-lora",
    "--enable-prompt-embeds", "--limit-mm-per-prompt", "--lora-modules", "--max-logprobs", "--max-lora-rank",
    "--max-model-len", "--reasoning-parser", "--tokenizer", "--tokenizer-mode", "--tool-call-parser",
    "--tool-parser-plugin", "--trust-request-chat-template",
})
"""By full name; a test holds them against vLLM's parser."""
_WORDS = "decode has the last word, so what prefill alone refuses goes without prefill; write it in spec.engine.args"


def notes(service: DisaggService) -> list[Fault]:
    """Where the roles differ in such an argument; the path is that of one that is set."""
    spec = service.spec
    if not spec.prefill.most:
        return []
    common = dict(_given(spec.engine.args))
    own = {"prefill": dict(_given(spec.prefill.args)), "decode": dict(_given(spec.decode.args))}
    found = []
    for name in sorted(JUDGING):
        of = {role: given.get(name, common.get(name)) for role, given in own.items()}
        values = [None if one is None else one[1] for one in of.values()]
        if values[0] == values[1]:
            continue
        role = next(role for role, given in own.items() if name in given)
        if None in values:
            words = f"{name} is set for {role} alone: {_WORDS}"
        else:
            words = f"{name} differs from the other role's: {_WORDS}"
        found.append(Fault(f"spec.{role}.args[{own[role][name][0]}]", words))
    return found


def _given(args: Sequence[str]) -> Iterator[tuple[str, tuple[int, tuple[str, ...]]]]:
    """``(name, (index, values))`` of the arguments that are in the table; of one that is repeated the last one counts."""
    for one in arguments.given(args):
        if one.name in JUDGING:
            yield one.name, (one.index, one.values)
