"""This tree beside the release before, both run for real: what an upgrade leaves alone, what each reads of the other."""

from __future__ import annotations

import json
from typing import Any

import pytest
import releases
from releases import ROOT, Release, raised

THIS = Release("this", ROOT)
REVISIONS = """
import contextlib, io, json, sys, yaml
from xpyd_operator.cli.main import main
found = {}
for file in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["render", "pods", "-f", file])
    if code:
        found[file] = err.getvalue()
        continue
    pods = [one for one in yaml.safe_load_all(out.getvalue()) if one["kind"] == "Pod"]
    found[file] = sorted([pod["metadata"]["name"], pod["metadata"]["labels"]["xpyd.dev/revision"]] for pod in pods)
print(json.dumps(found))
"""
"""By file: name and revision of each pod, or why there is none."""
SENDS = """
import base64, json, msgspec
from xpyd_sidecar.contract import assignment, fleet, membership
beat = {"v": membership.WIRE_VERSION, "service": "s", "instance": "s-e0", "seq": 7, "role": "decode", "epoch": 2,
        "state": "ready", "agent": "a", "incarnation": "a" * 32, "http": ["10.0.0.7:8000"],
        "control": ["10.0.0.7:4000"], "model": "m", "fingerprint": "f" * 32}
seen = {"instance": "s-e0", "role": "decode", "epoch": 2, "state": "ready", "incarnation": "a" * 32, "drained": False,
        "fingerprint": "f" * 32, "http": [], "control": [], "model": "m", "load": {}, "in_flight": 3, "beat_age_s": 0.5}
told = {"service": "s", "router": "r", "uptime_s": 9.0, "settled": True, "instances": [seen]}
packed = [msgspec.msgpack.encode(msgspec.convert(beat, membership.Heartbeat)),
          msgspec.json.encode(msgspec.convert(told, fleet.Fleet)),
          assignment.encode(assignment.Assignment("prefill", 3, 1.5)).encode()]
print(json.dumps([base64.b64encode(each).decode() for each in packed]))
"""
"""A beat, what a router tells, a role: each as this release writes it."""
READS = """
import base64, json, sys, msgspec
from xpyd_sidecar.contract import assignment, fleet, membership
from xpyd_sidecar.router.fleet import heartbeat_validation
beat, told, role = (base64.b64decode(each) for each in json.load(sys.stdin))
beat = msgspec.msgpack.decode(beat, type=membership.Up)
heartbeat_validation.refuse_foreign("s", beat)
heartbeat_validation.check(beat)
(seen,) = msgspec.json.decode(told, type=fleet.Fleet).instances
role = assignment.decode(role)
print(json.dumps([beat.instance, beat.state, beat.seq, beat.fingerprint, seen.instance, seen.state, seen.in_flight,
                  seen.fingerprint, role.role, role.epoch]))
"""
"""The same as this release reads them, refusals included."""
READ = ["s-e0", "ready", 7, "f" * 32, "s-e0", "ready", 3, "f" * 32, "prefill", 3]
SPEAKS = """
import json
from xpyd_sidecar.contract.fingerprint import FingerprintFields, digest
from xpyd_sidecar.kv.peers import SPOKEN
print(json.dumps([SPOKEN, digest(FingerprintFields("m", "float32", "float32", 128, "HND", "avx2", "0.32.0"))]))
"""


@pytest.fixture(scope="module")
def old() -> Release:
    try:
        return releases.before()
    except releases.Missing as error:
        pytest.skip(str(error))


def test_an_upgrade_gives_no_pod_another_revision(old: Release) -> None:
    """Else the new operator would replace every engine as soon as it works. Documents with settings that are gone are
    refused until somebody has followed the advice.
    """
    files = sorted(str(each) for each in (old.folder / "examples/kubernetes").rglob("*.yaml"))
    before, now = (release.run(REVISIONS, *files) for release in (old, THIS))
    rendered = {file: pods for file, pods in before.items() if isinstance(pods, list)}
    assert sum(map(len, rendered.values())) >= 20, before
    gone = {file for file in rendered if isinstance(now[file], str) and "this setting is gone; " in now[file]}
    assert len(gone) <= len(rendered) // 4, {file: now[file] for file in gone}
    assert {file: now[file] for file in rendered if file not in gone} == {
        file: pods for file, pods in rendered.items() if file not in gone}


def test_each_release_reads_what_the_other_says(old: Release) -> None:
    """Agents beat to routers of both, operators ask them, roles are told to agents of both."""
    for one, other in ((old, THIS), (THIS, old)):
        said: Any = one.run(SENDS)
        assert other.run(READS, stdin=json.dumps(said)) == READ, f"{other.name} reads what {one.name} wrote"


@pytest.mark.parametrize(("change", "same"), [("wire", 1), ("fingerprint", 0)])
def test_a_next_release_differs_in_what_it_is_told_to(change: releases.Change, same: int) -> None:
    this, following = THIS.run(SPEAKS), releases.following(change).run(SPEAKS)
    assert this[same] == following[same]
    assert this[1 - same] != following[1 - same]


def test_a_number_that_cannot_be_found_is_named() -> None:
    assert raised("a.py", "x = 1\nV: Final = 9\n", r"^V: Final = (\d+)$") == "x = 1\nV: Final = 10\n"
    with pytest.raises(AssertionError, match=r"a\.py has 0 of"):
        raised("a.py", "V = 9\n", r"^V: Final = (\d+)$")


def test_the_release_before_is_a_commit_of_this_history() -> None:
    """Upgrades would be skipped in every clone for ever, and nobody would see it."""
    if releases._git("rev-parse", "--is-shallow-repository").strip() == b"true":
        pytest.skip("this clone has no history")
    releases._git("merge-base", "--is-ancestor", releases.BEFORE, "HEAD")  # raises where it is none


def test_a_commit_that_nobody_has_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "BEFORE", "0" * 40)
    with pytest.raises(releases.Missing, match=r"000000000000, is not in this clone.*git fetch --unshallow"):
        releases.before()
