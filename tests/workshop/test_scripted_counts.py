"""What a prompt costs that is handed over on a device, counted: engines and connectors as they are, a scripted device.

Messages, prefill's launches and its wake-ups grow with chunks and groups of layers. Decode's launches and wake-ups grow
with fetches beside, of which each has as many arrays as a piece holds; with nothing else, and no core touches a byte.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from lab.scripted_device import parameters, report

ROOT: Final = Path(__file__).resolve().parents[2]
PIECE_BYTES: Final = {"lengths": 32 << 20, "with_room": 64 << 20}
"""A sixteenth of decode's ring: 512 MiB, or 1 GiB where vLLM leaves room for it."""
LENGTHS: Final = (256, 4096, 5000, 7000, 8192, 16384)
ROWS: Final = [(memory, tokens) for memory in PIECE_BYTES for tokens in LENGTHS]
PREFILL_LAUNCHES: Final = 4
"""Of a group that leaves: its tables in, rows, sums, sums out; and one copy for each manifest."""
FETCH_LAUNCHES: Final = 2 + 4
"""Of a fetch: its copy, cut where CUDA's parts of the mapping end; tables in, rows, sums, sums out."""
CONTROL_WAKES: Final = 8
"""Of both control threads, for one announcement."""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, dict[str, Any]]]:
    """Figures by prompt length, for both sizes of decode's ring."""
    file = tmp_path_factory.mktemp("scripted") / "figures.json"
    subprocess.run([sys.executable, "-m", "lab.scripted_device", "--rounds", "1", "--row", "0", "--no-streams", "--out",
                    file, "--lengths", *map(str, LENGTHS)], cwd=ROOT, check=True, capture_output=True, timeout=110)
    found = json.loads(file.read_text("utf-8"))
    return {memory: {int(tokens): row for tokens, row in found[memory].items()} for memory in PIECE_BYTES}


Counted = dict[str, dict[int, dict[str, Any]]]


@pytest.mark.parametrize(("memory", "tokens"), ROWS)
def test_no_core_touches_a_byte(counted: Counted, memory: str, tokens: int) -> None:
    row = counted[memory][tokens]
    assert row["fetches"] > 0
    assert report.touched(row) == 0


@pytest.mark.parametrize(("memory", "tokens"), ROWS)
def test_a_group_of_layers_costs_three_messages_and_a_prompt_three_more(counted: Counted, memory: str, tokens: int) -> None:
    row = counted[memory][tokens]
    assert report.messages(row) == 3 * row["manifests"] + row["presses"] + 3
    assert row["presses"] <= row["manifests"]
    if tokens <= parameters.CHUNK_TOKENS:  # a longer one's copies may be leased in parts
        assert row["manifests"] == row["gathers"]


@pytest.mark.parametrize(("memory", "tokens"), ROWS)
def test_prefills_launches_and_wake_ups_are_those_of_groups(counted: Counted, memory: str, tokens: int) -> None:
    row = counted[memory][tokens]
    assert row["launches_prefill"] == PREFILL_LAUNCHES * row["gathers"] + row["manifests"]
    assert row["wakes_prefill_copies"] <= row["gathers"]
    assert row["wakes_prefill_sender"] <= 2 * row["manifests"] + 4  # a copy is complete, TAKEN; the ends of the transfer


@pytest.mark.parametrize(("memory", "tokens"), ROWS)
def test_decodes_launches_and_wake_ups_are_those_of_groups_and_fetches(counted: Counted, memory: str, tokens: int) -> None:
    row = counted[memory][tokens]
    assert row["launches_decode"] <= FETCH_LAUNCHES * row["fetches"]
    assert row["wakes_decode_arrivals"] <= row["fetches"]
    assert row["wakes_receiver"] <= 2 * row["manifests"] + 3 * row["fetches"] + 6
    assert row["wakes_control"] <= CONTROL_WAKES


@pytest.mark.parametrize(("memory", "tokens"), ROWS)
def test_a_fetch_has_as_many_arrays_as_a_piece_holds(counted: Counted, memory: str, tokens: int) -> None:
    row = counted[memory][tokens]
    chunks = -(-tokens // parameters.CHUNK_TOKENS)
    array = -(-tokens // chunks // parameters.BLOCK_TOKENS) * parameters.BLOCK_BYTES
    whole = PIECE_BYTES[memory] // array
    assert whole >= 1
    assert row["fetches"] <= chunks * math.ceil(parameters.LAYERS / whole) + row["manifests"]


def test_prompts_of_as_many_groups_cost_the_same_messages_and_launches_of_prefill_whatever_bytes_they_have(
        counted: Counted) -> None:
    rows = [counted["with_room"][tokens] for tokens in (4096, 5000, 7000)]
    assert len({row["kv_mib"] for row in rows}) == 3
    assert {(row["manifests"], report.messages(row), row["launches_prefill"]) for row in rows} == {(4, 15, 20)}
