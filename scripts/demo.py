"""The demo: serve a DisaggService with real vLLM engines, ask it a question, and prove where the work was done.

    make demo                            the tiny model in examples/model
    make demo MODEL=path-or-hub-id       another one

Steps: `xpyd up`, one chat request through the router (streamed to the terminal), the same question to a plain engine, the
proof from the engines' own metrics. In a terminal the service then stays up until Ctrl-C; otherwise it is taken down, as it
is when a signal ends the demo (SIGTERM, or SIGHUP as the terminal goes away), at whatever step.
Exit code 0 only if the two answers are equal and decode computed no prompt token but the last.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "local" / "1p1d.yaml"
STATE = ROOT / ".cache" / "demo"
QUESTION = "What is xpyd?"
MAX_TOKENS = 200
PLAIN_START_S = 300
ENDING = (signal.SIGTERM, signal.SIGHUP)
ENGINE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Three engines share the machine: pinned threads would all land on the same core."""


def say(text: str) -> None:
    """A line of the demo's own."""
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def xpyd(*arguments: str, capture: bool = False) -> str:
    """Run the `xpyd` command; its failure ends the demo with its own words."""
    command = [str(Path(sys.executable).with_name("xpyd")), *arguments]
    done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    if done.returncode:
        raise SystemExit(f"demo: `xpyd {' '.join(arguments)}` ended with {done.returncode}")
    return done.stdout or ""


def document(model: str | None) -> tuple[Path, dict[str, Any]]:
    """The example, with another model where one is asked for; its path and content."""
    content = yaml.safe_load(EXAMPLE.read_text())
    if model is None:
        return EXAMPLE, content
    source = str(Path(model).resolve()) if Path(model).exists() else model
    content["spec"]["model"] = {"source": source, "servedName": Path(model).name}
    path = STATE / "demo.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path, content


def question(model: str) -> dict[str, Any]:
    """The request body: greedy, so that two engines must agree."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def post(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Stream a chat completion: the parsed events up to `[DONE]`."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    return
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
    except urllib.error.HTTPError as error:
        raise SystemExit(f"demo: {url} answered {error.code}: {error.read().decode(errors='replace')}") from None
    raise SystemExit(f"demo: the answer of {url} broke off")


def answer(url: str, model: str, *, show: bool) -> tuple[str, dict[str, int]]:
    """Ask; returns the text and the usage, and prints the text as it comes."""
    text, usage = "", {}
    for event in post(url, question(model)):
        if "error" in event:
            raise SystemExit(f"demo: {url}: {event['error']}")
        for choice in event.get("choices", ()):
            piece = choice["delta"].get("content") or ""
            text += piece
            if show:
                print(piece, end="", flush=True)
        usage = event.get("usage") or usage
    if show:
        print()
    return text, usage


def metric(address: str, name: str, **labels: str) -> int:
    """Sum of the samples of one metric on an engine's own `/metrics`."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    total = 0.0
    for line in lines:
        key, _, value = line.rpartition(" ")
        if key.partition("{")[0] == name and all(part in key for part in wanted):
            total += float(value)
    return int(total)


Readings = dict[str, dict[str, int]]


def readings(addresses: dict[str, str]) -> Readings:
    """What every engine counts, by instance."""
    return {
        name: {
            "prompt tokens computed": metric(at, "vllm:prompt_tokens_by_source_total", source="local_compute"),
            "prompt tokens from its own cache": metric(at, "vllm:prompt_tokens_by_source_total", source="local_cache_hit"),
            "prompt tokens received": metric(at, "vllm:prompt_tokens_by_source_total", source="external_kv_transfer"),
            "tokens through the model": metric(at, "vllm:iteration_tokens_total_sum"),
            "KV tokens pushed": metric(at, "xpyd_kv_pushed_tokens_total"),
            "KV bytes pushed": metric(at, "xpyd_kv_pushed_bytes_total"),
            "KV tokens loaded": metric(at, "xpyd_kv_loaded_tokens_total"),
        }
        for name, at in addresses.items()
    }


def settled(addresses: dict[str, str], before: Readings, tokens: int) -> Readings:
    """Readings once the engines have counted the request (their statistics lag by a step), or after ten seconds."""
    deadline = time.monotonic() + 10
    while True:
        now = readings(addresses)
        counted = sum(now[name]["KV tokens pushed"] - before[name]["KV tokens pushed"] for name in now)
        if counted >= tokens or time.monotonic() > deadline:
            return now
        time.sleep(0.2)


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def plain_engine(spec: dict[str, Any], log: Path) -> Iterator[str]:
    """One vLLM engine that knows nothing of xpyd, with the service's own engine arguments; yields its URL."""
    source = spec["model"]["source"]
    local = EXAMPLE.parent / source
    port = free_port()
    argv = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    argv += ["--model", str(local.resolve()) if local.exists() else source, "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--served-model-name", spec["model"]["servedName"], *spec["engine"].get("args", ())]
    environment = os.environ | ENGINE_ENVIRONMENT
    with log.open("wb") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        wait_ready(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(20)
        finally:
            with suppress(ProcessLookupError):  # its engine core may outlive it
                os.killpg(process.pid, signal.SIGKILL)


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the engine answers its health check."""
    deadline = time.monotonic() + PLAIN_START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
    raise SystemExit(f"demo: the plain engine did not start; the end of {log}:\n{tail}")


def proof(roles: dict[str, str], before: Readings, after: Readings, usage: dict[str, int]) -> bool:
    """Print what changed on each engine between the two readings; True if decode computed no prompt token but the last.

    Decode computes the prompt's last token, of which the first one of the answer comes, and vLLM counts both of them. So
    the tokens that went through its model are one more than those of the answer exactly when it computed no other of the
    prompt.
    """
    computed = -1
    for name, role in sorted(roles.items(), key=lambda item: item[1], reverse=True):
        change = {what: after[name][what] - before[name][what] for what in after[name]}
        print(f"  {name} ({role})")
        for what, value in change.items():
            if value:
                print(f"    {what:34} {value:>10,}")
        if role == "decode":
            computed = change["tokens through the model"] - usage["completion_tokens"]
            print(f"    {'prompt tokens that decode computed':34} {computed:>10,}")
    return computed == 1


def run(model: str | None) -> bool:
    """The whole demo; True if everything held."""
    STATE.mkdir(parents=True, exist_ok=True)
    path, content = document(model)
    name, spec = content["metadata"]["name"], content["spec"]
    served = spec["model"]["servedName"]
    try:
        say(f"$ xpyd up -f {path.relative_to(ROOT)} --detach")
        xpyd("up", "-f", str(path), "--detach")
        xpyd("status", name)
        status = json.loads(xpyd("status", name, "-o", "json", capture=True))
        url = status["url"]
        roles = {instance["name"]: instance["role"] for instance in status["instances"]}
        addresses = {instance["name"]: instance["address"] for instance in status["instances"]}
        before = readings(addresses)
        say(f"{QUESTION}   (asked at {url}, greedy)")
        text, usage = answer(url, served, show=True)
        after = settled(addresses, before, usage["prompt_tokens"])
        say("The proof, from the engines' own /metrics:")
        exact = proof(roles, before, after, usage)
        say("The same question to one plain vLLM engine (starting it takes a while):")
        with plain_engine(spec, STATE / "plain.log") as plain:
            expected, _ = answer(plain, served, show=True)
        same = text == expected
        print("  the answers are equal" if same else "  THE ANSWERS DIFFER")
        if not exact:
            print("  DECODE COMPUTED PROMPT TOKENS ITSELF")
        if same and exact and sys.stdin.isatty() and sys.stdout.isatty():
            serve(url, served)
        return same and exact
    finally:
        try:
            ignore_signals()
            with suppress(OSError):  # perhaps nobody reads any more
                say(f"$ xpyd down {name}")
        finally:  # a signal may have come before it was ignored
            xpyd("down", name)


def serve(url: str, served: str) -> None:
    """Stay up until Ctrl-C."""
    body = json.dumps({"model": served, "messages": [{"role": "user", "content": "Who picks the engines?"}]})
    say("Serving until Ctrl-C. Try, in another terminal:")
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'")
    with suppress(KeyboardInterrupt):
        signal.pause()


def end_by(number: int, _: FrameType | None) -> NoReturn:
    """Take everything down, as Ctrl-C does; another such signal changes nothing."""
    ignore_signals()
    leave_terminal(number, None)
    raise SystemExit(128 + number)


def ignore_signals() -> None:
    """End by no signal any more."""
    for each in ENDING:
        signal.signal(each, leave_terminal)


def leave_terminal(number: int, _: FrameType | None) -> None:
    """After SIGHUP there is no terminal: what is written from now on goes nowhere."""
    if number == signal.SIGHUP:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description="Serve a DisaggService locally and prove what it does.")
    parser.add_argument("--model", help="path or hub id of another model")
    arguments = parser.parse_args()
    for number in ENDING:
        signal.signal(number, end_by)
    os.environ["XPYD_HOME"] = str(STATE / "home")
    return 0 if run(arguments.model) else 1


if __name__ == "__main__":
    sys.exit(main())
