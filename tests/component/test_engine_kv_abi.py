"""Versions of vLLM that exchange KV write it alike: by the digests of their sources (``lab/tools/kv_sources.py``)."""

from __future__ import annotations

import importlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from scripts import load

from xpyd_sidecar.engine import compat
from xpyd_sidecar.engine.compat import common

ROOT = Path(__file__).resolve().parents[2]
tool = load(ROOT / "lab/tools/kv_sources.py")
RECORD = json.loads((ROOT / "tests/data/kv_sources.json").read_text())
RECORDED, REASONS = RECORD["versions"], RECORD["reasons"]
SAME = dict.fromkeys(tool.GROUPS, "1" * 16)


def all_names() -> dict[str, str]:
    names: dict[str, str] = {}
    for module in common.KNOWN.values():
        names |= importlib.import_module(f"{compat.__name__}.{module}").KV_ABI
    return names


def test_versions_of_one_name_write_kv_alike_or_the_record_says_why_not_matters() -> None:
    assert tool.unexplained(all_names(), RECORDED, REASONS) == []


def test_the_record_of_the_installed_version_is_that_of_its_sources() -> None:
    version, found = tool.digests(tool.installed())
    assert version == compat.version()
    assert RECORDED[version] == tool.record(found)
    assert all(len(files) >= least for files, least in zip(found.values(), (20, 80, 1, 5, 200), strict=True))


def test_vllm_0_33_writes_kv_by_other_sources_and_has_no_name_of_0_32() -> None:
    differ = [group for group in tool.GROUPS if RECORDED["0.32.0"][group] != RECORDED["0.33.0"][group]]
    assert differ == ["rope", "cache update", "quantisation", "page layout", "models"]
    assert tool.unexplained({"0.32.0": "0.32.0", "0.33.0": "0.32.0"}, RECORDED, REASONS) == [
        f"0.32.0, 0.33.0: no reason for {group}" for group in (*differ, tool.COMPILED)]


@pytest.mark.parametrize(("names", "recorded", "reasons", "said"), [
    ({"1": "1", "2": "2"}, {"1": SAME, "2": {}}, {}, []),
    ({"1": "1", "2": "1"}, {"1": SAME, "2": SAME}, {"1, 2": {"compiled": "csrc is the same at both tags"}}, []),
    ({"1": "1", "2": "1"}, {"1": SAME, "2": SAME}, {}, ["1, 2: no reason for compiled"]),
    ({"1": "1", "2": "1"}, {"1": SAME, "2": SAME | {"rope": "2"}}, {"1, 2": {"compiled": "x"}},
     ["1, 2: no reason for rope"]),
    ({"1": "1", "2": "1"}, {"1": SAME, "2": SAME | {"rope": "2"}}, {"1, 2": {"compiled": "x", "rope": "a comment"}}, []),
    ({"1": "1", "2": "1"}, {"1": SAME}, {}, ["2: its sources are not recorded"]),
    ({"2": "1"}, {"2": SAME}, {}, ["2: 1 is none of the versions that have this name"]),
    ({"1": "1", "2": "1", "3": "1"}, dict.fromkeys("123", SAME), {"1, 2": {"compiled": "x"}, "1, 3": {"compiled": "x"}},
     ["2, 3: no reason for compiled"]),
], ids=["two names", "one name", "no word of what is compiled", "another rope", "a reason", "no record", "a name of nobody",
        "each with each"])
def test_what_is_asked_for_one_name(names: dict[str, str], recorded: dict[str, Any], reasons: dict[str, Any],
                                    said: list[str]) -> None:
    assert tool.unexplained(names, recorded, reasons) == said


def test_a_wheel_and_its_folder_are_read_alike_and_every_byte_of_a_source_counts(tmp_path: Path) -> None:
    files = {"_version.py": "__version__ = version = '9.1'\n", "v1/attention/ops/store.py": "x = 1\n",
             "v1/attention/backends/mla/deep.py": "x = 2\n", "model_executor/layers/rotary_embedding/base.py": "y = 1\n",
             "config/model.py": "nothing of KV\n"}
    wheel = tmp_path / "vllm.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for name, text in files.items():
            packed.writestr(f"vllm/{name}", text)
            (path := tmp_path / "site" / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    version, found = tool.digests(wheel)
    assert (version, found) == tool.digests(tmp_path / "site")
    assert version == "9.1"
    assert {group: sorted(one) for group, one in found.items() if one} == {
        "rope": ["model_executor/layers/rotary_embedding/base.py"],
        "cache update": ["v1/attention/backends/mla/deep.py", "v1/attention/ops/store.py"]}
    before = tool.record(found)
    (tmp_path / "site/vllm/v1/attention/ops/store.py").write_text("x = 1 \n")
    after = tool.record(tool.digests(tmp_path / "site")[1])
    assert [group for group in before if before[group] != after[group]] == ["cache update"]
    (tmp_path / "site/vllm/_version.py").unlink()
    with pytest.raises(ValueError, match="no vLLM of a known version"):
        tool.digests(tmp_path / "site")
