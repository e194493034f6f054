"""The table of sampled streams: which of them another engine can go on with so that nobody can tell, and why.

A sampled answer without a seed has no second run, so nothing can be compared. What has to be the same is its distribution:

    P(t₁ … tₙ) = Π P(tᵢ | prompt, t₁ … tᵢ₋₁)

An engine that is given ``prompt, t₁ … tₖ`` as its prompt draws tₖ₊₁ … from the right one if P depends on the tokens before
it alone, wherever prompt ends and output begins (EXACT). What counts, matches or parses the output as such (HISTORY) would
begin anew behind the cut. A field that stands in neither table is taken for HISTORY.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Raw

from xpyd_sidecar.contract.membership import Sampling
from xpyd_sidecar.router.api.fields import is_null

Fields = Mapping[str, Raw]



def _because(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


EXACT: dict[str, str] = {
    **_because("shapes the prompt, whose token ids the other engine is given", "model", "prompt", "messages",
               "add_special_tokens", "truncate_prompt_tokens", "truncation_side", "cache_salt", "chat_template",
               "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "documents", "reasoning_effort"),
    **_because("says whose request it is, and when it runs", "user", "priority", "session_id", "request_id"),
    **_because("changes how one token is drawn, by the logits of that token alone", "temperature", "top_p", "top_k",
               "min_p", "logit_bias", "allowed_token_ids"),
    **_because("counts prompt and output alike", "repetition_penalty"),
    **_because("is asked for less what came", "max_tokens", "max_completion_tokens", "min_tokens"),
    **_because("looks at one token", "stop_token_ids", "ignore_eos"),
    **_because("changes what is shown of the tokens, not which they are", "stream", "stream_options", "logprobs",
               "top_logprobs", "logprob_token_ids", "skip_special_tokens", "return_tokens_as_token_ids",
               "return_token_ids"),
    **_because("means nothing without stop strings", "include_stop_str_in_output"),
    **_because("means nothing without a beam search", "length_penalty"),
    **_because("means nothing without tools", "tool_choice", "parallel_tool_calls"),
    **_because("is null: a request with a seed is run again", "seed"),
}
"""Fields whatever their value is, and why."""

HISTORY: dict[str, str] = {
    **_because("counts the tokens of the output, which are prompt behind the cut", "presence_penalty", "frequency_penalty"),
    **_because("has a state that follows the output, and begins anew behind the cut", "structured_outputs",
               "response_format", "tools", "include_reasoning", "repetition_detection", "watermarking",
               "spaces_between_special_tokens", "thinking_token_budget"),
    **_because("may begin before the cut and end behind it", "stop"),
    **_because("matches words of several tokens with the output; a router has no tokenizer to tell which they are",
               "bad_words"),
    **_because("draws several sequences", "n", "best_of", "use_beam_search"),
    **_because("makes the prompt more than its ids, or has them not taken in its place", "prompt_embeds", "echo", "suffix",
               "mm_payload", "media_io_kwargs", "mm_processor_kwargs"),
    **_because("would show tokens that came as prompt", "prompt_logprobs", "routed_experts_prompt_start",
               "return_prompt_text", "return_token_offsets", "return_mm_kwargs"),
    **_because("is read by extensions that nobody knows here", "vllm_xargs"),
    **_because("groups tokens from the first one of the output on", "stream_interval", "return_weight_versions"),
}
"""Fields unless their value says that they are not used (``failover_modes.TABLE`` knows such values), and why."""


class EngineDefaults(msgspec.Struct, frozen=True):
    """What the decode engines of a fleet add to requests, taken together."""

    alike: bool = False
    """All have told it, and the same."""
    known: tuple[Sampling, ...] = ()
    """What was told, each once."""

    def counted(self, fields: Fields) -> list[Fields]:
        """The fields as each kind of engine has them: with what it adds, as if that stood in the request."""
        found = [_with(fields, one) for one in self.known if one.defaults or one.own]
        return found if found and self.alike else [*found, fields]

    @property
    def bound(self) -> int:
        """Most tokens for any request; 0: none."""
        return min((one.max_tokens for one in self.known if one.max_tokens), default=0)

    def default(self, name: str) -> float | None:
        """What a field is where the request has none; None: not told, or not by all alike."""
        return dict(self.known[0].defaults).get(name) if self.alike else None


UNTOLD = EngineDefaults()


class SamplingTerms(msgspec.Struct, frozen=True):
    """On which terms streams go on elsewhere."""

    sampled: bool = False
    """Sampled ones too, where they keep their distribution."""
    told: EngineDefaults = UNTOLD


EXACT_ALONE = SamplingTerms()
"""Those alone whose every token is determined."""


def told_of(engines: Iterable[Sampling | None]) -> EngineDefaults:
    """What engines add, taken together."""
    given = list(engines)
    known: list[Sampling] = []
    for one in given:
        if one is not None and one not in known:
            known.append(one)
    return EngineDefaults(len(known) == 1 and None not in given, tuple(known))


def _with(fields: Fields, added: Sampling) -> Fields:
    """A field of the request counts before an engine's; null is as good as absent."""
    out = dict(fields)
    for name, value in added.defaults:
        if name not in out or is_null(out[name]):
            out[name] = Raw(msgspec.json.encode(value))
    for name in added.own:
        out[f"the engine's own {name}"] = Raw(b"true")  # no table knows it
    return out


def keeps_distribution(fields: Fields) -> bool:
    """Whether a sampled stream may go on from its ids, where a greedy one may (``ways.way_if_greedy``)."""
    return all(is_null(raw) or name in EXACT or (name in HISTORY and (name != "stop" or bytes(raw) == b"[]"))
               for name, raw in fields.items())
