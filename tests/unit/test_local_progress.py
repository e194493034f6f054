"""Lines as vLLM 0.32 prints them on a CPU and a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_operator.local.progress import Progress, advance, latest
from xpyd_operator.local.units import START_LINE

A = "(APIServer pid=8620) INFO 11-21 10:36:35 "
W = "(Worker pid=8859) INFO 11-21 10:37:15 "
LINES = [
    (f"{A}[api_utils.py:286] non-default args: {{'host': '127.0.0.1'}}", "reading the model's configuration"),
    (f"{A}[model.py:733] Resolved architecture: LlamaForCausalLM", "starting the engine core (LlamaForCausalLM)"),
    ("(EngineCore pid=1) INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with", "starting the workers"),
    (f"{W}[cpu_model_runner.py:68] Starting to load model /m...", "loading the model"),
    ("Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01]", "loading weights, 50 % (2/4 files)"),
    (f"{W}[default_loader.py:501] Loading weights took 0.01 seconds", "weights loaded in 0.01 s, profiling memory"),
    ("INFO [kv_cache_utils.py:2327] CPU KV cache size: 524,288 tokens, M", "warming up (KV cache of 524,288 tokens)"),
    ("Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  45%|####", "capturing graphs, 45 %"),
    (
        "INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 4.14 s",
        "engine set up in 4.14 s, starting the HTTP server",
    ),
    ("INFO:     Application startup complete.", "HTTP server up, waiting for its health check"),
]


@pytest.mark.parametrize(("line", "phase"), LINES, ids=[phase for _, phase in LINES])
def test_each_phase_is_known(line: str, phase: str) -> None:
    assert advance(Progress(), [line]).phase == phase


def test_phases_follow_each_other_and_a_new_start_begins_anew() -> None:
    progress = advance(Progress(), [line for line, _ in LINES])
    assert progress.phase == LINES[-1][1]
    assert advance(progress, [f"{START_LINE} engine, 2026-11-21 10:00:00 UTC"]) == Progress()


def test_the_reason_of_a_failure_is_kept_without_its_prefix() -> None:
    progress = advance(Progress(), [f"{A}[x.py:1] ValueError: no such model", "Traceback …"])
    assert progress.error == "ValueError: no such model"


def test_latest_reads_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    assert latest(log) == Progress()
    log.write_text("\n".join(line for line, _ in LINES[:4]) + "\nnoise\n")
    assert latest(log).phase == "loading the model"
