"""The forms of spec.model.source."""

from __future__ import annotations

import re

import pytest

from xpyd_operator.api.source import SOURCE_PATTERN, Bucket, Claim, Folder, Hub, Image, RelativePath, Source, parse

DIGEST = f"@sha256:{'0f' * 32}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-8B", Hub(id="Qwen/Qwen3-8B")),
        ("gpt2", Hub(id="gpt2")),
        ("a.b/c_d-1.5", Hub(id="a.b/c_d-1.5")),
        ("/models/qwen", Folder(path="/models/qwen")),
        ("pvc://claim/path/to", Claim(claim="claim", path="path/to")),
        ("pvc://claim", Claim(claim="claim", path="")),
        ("pvc://claim/", Claim(claim="claim", path="")),
        ("oci://registry.example/team/qwen:v1", Image(reference="registry.example/team/qwen:v1", path="")),
        ("oci://host.example/team/qwen:v1/models/a/", Image(reference="host.example/team/qwen:v1", path="models/a")),
        ("oci://host:5000/qwen", Image(reference="host:5000/qwen", path="")),
        (f"oci://host/qwen{DIGEST}", Image(reference=f"host/qwen{DIGEST}", path="")),
        (f"oci://host/qwen:v1{DIGEST}/m", Image(reference=f"host/qwen:v1{DIGEST}", path="m")),
        ("oci://host/qwen/models", Image(reference="host/qwen/models", path="")),
        ("s3://bucket/models/qwen3-8b", Bucket(url="s3://bucket/models/qwen3-8b")),
        ("s3://bucket/qwen/", Bucket(url="s3://bucket/qwen/")),
        ("gs://my_bucket", Bucket(url="gs://my_bucket")),
        ("az://container/qwen", Bucket(url="az://container/qwen")),
        ("./weights", RelativePath(path="./weights")),
        ("../model/weights", RelativePath(path="../model/weights")),
    ],
)
def test_forms(text: str, expected: Source) -> None:
    assert parse(text) == expected
    assert re.fullmatch(SOURCE_PATTERN, text)


@pytest.mark.parametrize(
    "text", ["", "a b", "a/b/c", "https://x/y", "pvc://", "pvc:///x", "pvc://Claim/x", "-x", "a/", ".x", "s3://", "s3:///k",
             "S3://b/k", "s3://b/k?v=1", "s3://b/a b", "ftp://b/k", "oci://", "oci://qwen:v1", "oci://host/Qwen:v1",
             "oci://host/qwen/Models", "oci://host/qwen@sha256:12", "oci://host/qwen:"]
)
def test_what_has_no_form_is_refused_and_all_forms_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"a hub id .* pvc://claim/path"):
        parse(text)
    assert not re.fullmatch(SOURCE_PATTERN, text)
