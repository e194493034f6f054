"""The hash of a model changes with its configuration and its weights."""

from __future__ import annotations

import struct
from pathlib import Path

from xpyd_sidecar.engine.weights import model_hash


def folder(path: Path, header: bytes = b'{"w":{}}', weights: bytes = b"1234") -> str:
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + weights)
    return str(path)


def test_equal_folders_of_other_names_hash_alike(tmp_path: Path) -> None:
    assert model_hash(folder(tmp_path / "a"), "", "{}") == model_hash(folder(tmp_path / "b"), "", "{}")


def test_configuration_weights_and_commit_count(tmp_path: Path) -> None:
    base = folder(tmp_path / "a")
    found = {model_hash(base, "", "{}"), model_hash(base, "", "{1}"),
             model_hash(folder(tmp_path / "b", weights=b"1235"), "", "{}"),
             model_hash("org/model", "c1", "{}"), model_hash("org/model", "c2", "{}"), model_hash("org/other", "c1", "{}")}
    assert len(found) == 6
    assert all(len(one) == 32 for one in found)


def test_large_folders_are_told_apart_by_headers_and_sizes(tmp_path: Path) -> None:
    base = model_hash(folder(tmp_path / "a"), "", "{}", whole_bytes=4)
    assert model_hash(folder(tmp_path / "b", weights=b"9999"), "", "{}", whole_bytes=4) == base  # the known weakness
    assert model_hash(folder(tmp_path / "c", header=b'{"v":{}}'), "", "{}", whole_bytes=4) != base
    assert model_hash(folder(tmp_path / "d", weights=b"12345"), "", "{}", whole_bytes=4) != base


def test_a_truncated_file_is_no_crash(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    assert len(model_hash(str(tmp_path), "", "{}", whole_bytes=1)) == 32
