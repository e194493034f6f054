"""The arithmetic of lab/bench/router: what is told about routers must not be wrong by a formula."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from scripts import load

BENCH = Path(__file__).parents[2] / "lab" / "bench" / "router"


measures, plot = load(BENCH / "measures.py"), load(BENCH.parent / "charts.py")


def test_a_ratio_is_taken_within_a_round():
    assert measures.ratios([1.0, 4.0], [2.0, 16.0]) == [0.5, 0.25]


def test_rounds_that_do_not_pair_are_refused():
    with pytest.raises(ValueError, match="2 rounds of one against 1"):
        measures.ratios([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="2 rounds of one against 1"):
        measures.added([1.0, 2.0], [1.0])


def test_a_ratio_to_nothing_is_refused():
    with pytest.raises(ValueError, match="a ratio to 0"):
        measures.ratios([1.0, 1.0], [1.0, 0.0])


def test_the_spread_is_median_and_quartiles():
    assert measures.spread("x", [5.0, 1.0, 3.0, 2.0, 4.0]) == {"x": 3.0, "x_p25": 2.0, "x_p75": 4.0}


def test_two_rounds_have_no_spread():
    with pytest.raises(ValueError, match="at least 3 rounds"):
        measures.spread("x", [1.0, 2.0])


def test_all_figures_of_the_rounds():
    cpu_ms = {chunks: {"xpyd": [1.0 * scale] * 3, "xpyd_error": [0.8 * scale] * 3, "nginx": [2.0 * scale] * 3,
                       "vllm_router": [4.0 * scale] * 3} for chunks, scale in ((128, 10), (8, 1))}
    first_us = {"direct": [20.0, 30.0, 40.0], "xpyd": [120.0, 130.0, 140.0], "vllm_router": [220.0, 230.0, 240.0]}
    found = measures.figures(cpu_ms, first_us)
    assert found["cpu_vs_vllm_router_128"] == 0.25
    assert found["cpu_vs_vllm_router_8"] == 0.25
    assert found["cpu_vs_nginx_128"] == 0.5
    assert found["continue_cpu_vs_error"] == 1.25
    assert found["ttft_added_p50_vs_vllm_router"] == 0.5, "of what is added, not of the whole time"
    assert found["cpu_ms_xpyd_128"] == 10.0
    assert found["ttft_added_us_vllm_router"] == 200.0
    assert found.pop("ttft_rounds_left_out") == 0
    assert all(f"{key}_p25" in found and f"{key}_p75" in found for key in found if not key.endswith(("_p25", "_p75")))


def test_a_round_in_which_the_machine_held_up_direct_clients_says_nothing_of_what_a_router_adds():
    cpu_ms = {8: {"xpyd": [1.0] * 4, "xpyd_error": [1.0] * 4, "vllm_router": [1.0] * 4}}
    first_us = {"direct": [20.0, 500.0, 30.0, 40.0], "xpyd": [120.0, 125.0, 130.0, 140.0],
                "vllm_router": [220.0, 225.0, 230.0, 240.0]}
    found = measures.figures(cpu_ms, first_us)
    assert found["ttft_added_p50_vs_vllm_router"] == 0.5
    assert found["ttft_rounds_left_out"] == 1


def test_processor_time_of_another_process():
    script = "import sys\nfor _ in range(3 * 10 ** 6): pass\nprint(flush=True)\nsys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        used = measures.cpu_s([child.pid])
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        assert used > 0.01
        assert abs(used - ticks) < 0.03
        time.sleep(0.2)
        assert measures.cpu_s([child.pid]) - used < 0.05, "sleeping costs nothing"


def test_peak_memory_is_that_of_the_largest_process():
    own = measures.peak_rss_mb([os.getpid()])
    assert 5 < own < 5000
    assert measures.peak_rss_mb([os.getpid(), 2 ** 22 + 1]) >= own, "one that has ended says nothing"


def test_the_chart_shows_each_bar_in_proportion():
    chart = plot.bars("a & b", [("ms", [plot.Bar("xpyd", 1.0, 0.9, 1.1), plot.Bar("nginx", 2.0, 1.8, 2.2)])])
    root = ET.fromstring(chart)
    name = "{http://www.w3.org/2000/svg}"
    widths = [float(each.get("width", "0")) for each in root.iter(f"{name}rect")][1:]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01)
    assert [each.text for each in root.iter(f"{name}text")][:2] == ["a & b", "ms"]
