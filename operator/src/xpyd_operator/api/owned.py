"""Engine arguments and environment that xpyd sets itself, and what to write instead.

vLLM's parser reads an option as ``--x y`` and ``--x=y``, with ``_`` for ``-``, shortened as far as it stays unambiguous
(``--tensor-par``), with a dot into an object (``--kv-transfer-config.kv_role``), and by a few short names (``-tp``). An
option that xpyd sets is refused in each of these forms. The check in Python and the CRD's CEL rule come from one table.
"""

from __future__ import annotations

import re

_ENDPOINT = "an engine listens where xpyd tells the router; ports for clients: spec.router.ports"
_PARALLEL = "write spec.prefill.parallelism or spec.decode.parallelism"
_KV = "write spec.kv; a store of KV beside it: spec.kv.offload"
_OFFLOAD = "write spec.kv.offload.memory"
_KEYS = "write spec.router.apiKeySecret; engines are reached by their routers only"
_OTHER_NAME = "take another name or leave it out"
_CONTEXT = "KV that is split over the context cannot be handed over"

_TABLE: dict[str, str] = {
    "--model": "write spec.model.source",
    "--ser|ved-model-name": "write spec.model.servedName",
    "--rev|ision": "write spec.model.revision",
    "--do|wnload-dir": "write spec.model.cache",
    "--hf-t|oken": "write spec.model.tokenSecret",
    "--kv-t|ransfer-config": _KV,
    "--kv-offloading-b|ackend": "write spec.kv.offload.memory, or spec.kv.offload.store for another backend",
    "--kv-o|ffloading-size": _OFFLOAD,
    "--ho|st": _ENDPOINT,
    "--por|t": _ENDPOINT,
    "--ud|s": _ENDPOINT,
    "--gr|pc": _ENDPOINT,
    "--hea|dless": _ENDPOINT,
    "--api-s|erver-count": _ENDPOINT,
    "--api-k|ey": _KEYS,
    "--ro|ot-path": _ENDPOINT,
    "--ssl|": _ENDPOINT,
    "--enable-ss|l-refresh": _ENDPOINT,
    "--no-enable-ss|l-refresh": _ENDPOINT,
    "--disable-ss|l-refresh": _ENDPOINT,
    "--shu|tdown-timeout": "write spec.drain.timeout",
    "--config": "write the arguments themselves; a file could set any of them",
    "--te|nsor-parallel-size": _PARALLEL,
    "--pi|peline-parallel-size": _PARALLEL,
    "--da|ta-parallel-size": _PARALLEL,
    "--no-da|ta-parallel-hybrid-lb": _PARALLEL,
    "--dec|ode-context-parallel-size": _CONTEXT,
    "--prefill-c|ontext-parallel-size": _CONTEXT,
    "--distributed-e|xecutor-backend": "leave it out: workers are processes of their pod",
    "--nn|odes": _PARALLEL,
    "--nod|e-rank": _PARALLEL,
    "--mas|ter-addr": _PARALLEL,
}
"""Long options. What stands before the bar is enough for vLLM to know the option, or one of its family such as
``--data-parallel-rank``; an option without a bar begins like free ones, and only the full name is refused."""
SHORT: dict[str, str] = {
    "-t": "--tensor-parallel-size",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpl": "--data-parallel-size-local",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-as": "--api-server-count",
    "-asc": "--api-server-count",
}
_FULL = {option: instead for option, instead in _TABLE.items() if "|" not in option}
_HEADS = {option.partition("|")[0]: (option.replace("|", ""), text) for option, text in _TABLE.items() if "|" in option}
_ATTACHED = re.compile(r"(-[nr])[0-9]+")
"""vLLM's two options of one letter may have their value attached."""

SPACED_PATTERN = r"^--?[A-Za-z][^= ]* "
"""An option and its value in one item, which vLLM would not understand."""
_ENV = {"XPYD_.*": _OTHER_NAME, "PYTHONPATH": _OTHER_NAME, "VLLM_HOST_IP": _ENDPOINT, "VLLM_PORT": _ENDPOINT,
        "VLLM_DP_.*": _PARALLEL, "VLLM_PLUGINS": _OTHER_NAME, "VLLM_API_KEY": _KEYS}
"""Variables that xpyd sets itself, and those that do what an owned argument does."""
ENV_PATTERN = rf"^({'|'.join(_ENV)})$"


def option_of(argument: str) -> tuple[str, str] | None:
    """The option that an engine argument gives and xpyd sets itself, in any spelling that vLLM accepts, and what to write
    instead; None where the argument is the user's to set.
    """
    name = re.split(r"[=.]", argument, maxsplit=1)[0]
    name = name[:2] + name[2:].replace("_", "-")
    if attached := _ATTACHED.fullmatch(name):
        name = attached[1]
    name = SHORT.get(name, name)
    if name in _FULL:
        return name, _FULL[name]
    for head, (option, instead) in _HEADS.items():
        if name.startswith(head) and re.fullmatch(r"[-a-z]*", name):
            return (option if option.startswith(name) else name), instead
    return None


def is_spaced_option(argument: str) -> bool:
    """Whether an argument is an option and its value in one item with a space between, which vLLM does not understand."""
    return re.search(SPACED_PATTERN, argument) is not None


def env(name: str) -> str:
    """What to write instead of an environment variable that xpyd sets itself; empty where it is the user's to set."""
    return next((instead for pattern, instead in _ENV.items() if re.fullmatch(pattern, name)), "")


def listing() -> list[tuple[str, str]]:
    """Every option that xpyd sets itself, with what to write instead, for the reference. A ``*`` at the end of a name
    stands for any ending.
    """
    return [(option.replace("|", "") + ("*" if option.endswith("|") else ""), text) for option, text in _TABLE.items()]


def expression() -> str:
    """A regular expression (RE2) that matches the arguments for which ``option_of`` finds an option. Kept short, since
    the cost of a CEL rule grows with it.
    """
    heads = "|".join(head.removeprefix("--").replace("-", "[-_]") for head in _HEADS)
    full = "|".join(option.removeprefix("--") for option in _FULL)
    short = "|".join(name.removeprefix("-") for name in SHORT)
    return f"^(--(({heads})[-_a-z]*|{full})|-({short}|[nr][0-9]+))([=.]|$)"


def message() -> str:
    """A CEL expression that gives the error message for a list of engine arguments (``self``): it names one option in it
    that xpyd sets itself, the first in the table's order, and what to write instead.

    All texts are constants, chosen by what arguments begin with: an API server refuses messages that are built from the
    list or chosen by regular expressions, since it cannot bound their cost. An option that is not found so (``_`` for
    ``-``) gets a general text.
    """
    words = "'one of these is set by xpyd; see the reference of engine.args'"
    shorts: dict[str, list[str]] = {}
    for short, option in SHORT.items():
        shorts.setdefault(_row(option), []).append(short)
    for row, instead in reversed(_TABLE.items()):
        option, head = row.replace("|", ""), row.partition("|")[0]
        find = f"a.startsWith('{head}')" if "|" in row else f"a == '{option}' || a.startsWith('{option}=')"
        if row in shorts:
            find = f"{find} || a in {shorts[row]}"
        words = f"self.exists(a, {find}) ? '{_quoted(f'{option} is set by xpyd; {instead}')}' : {words}"
    return words


def _row(option: str) -> str:
    """The key of the table's row that covers a long option which xpyd sets itself."""
    return next(row for row in _TABLE if option.startswith(row.partition("|")[0]))


def _quoted(text: str) -> str:
    return text.replace("'", r"\'")
