"""Health of a DisaggService as Argo CD's Lua interpreter and Flux's kstatus see it, in each state that it can have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from gitops_judge import SETTINGS, Judge

PAGE = Path(__file__).resolve().parents[2] / "docs/gitops.md"
JUDGE = Judge.found()
needs_judge = pytest.mark.skipif(JUDGE is None, reason="not built: python scripts/tiers.py gitops")
Conditions = dict[str, tuple[str, str, str]]
FINE: Conditions = {
    "Ready": ("True", "AllReady", "1P2D ready"), "Progressing": ("False", "Settled", "everything is as asked for"),
    "Degraded": ("False", "Healthy", "nothing needs a person"), "Compatible": ("True", "SameFingerprint", ""),
    "Valid": ("True", "Valid", "the document is followed"),
}
MOVES = ("True", "Changing", "changing: qwen-e3")


def service(conditions: Conditions, *, seen: int = 3, updated: int = 2, ready: int = 2, wanted: int = 2) -> dict[str, Any]:
    """One of generation 3, whose status is about ``seen``; counts are those of decode."""
    said = [{"type": kind, "status": status, "reason": reason, "message": message}
            for kind, (status, reason, message) in conditions.items()]
    roles = {"prefill": {"wanted": 1, "ready": 1, "updated": 1},
             "decode": {"wanted": wanted, "ready": ready, "updated": updated}}
    return {"apiVersion": "xpyd.dev/v1beta1", "kind": "DisaggService",
            "metadata": {"name": "qwen", "namespace": "models", "generation": 3},
            "status": {"observedGeneration": seen, "conditions": said, "roles": roles}}


STATES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "settled": (service(FINE), "Healthy", "Current", "1P2D ready"),
    "scaled up": (service(FINE | {"Ready": ("True", "Serving", "2 of 4 ready"), "Progressing": MOVES}, wanted=4, updated=4),
                  "Healthy", "Current", "2 of 4"),
    "scaled down": (service(FINE | {"Progressing": MOVES}, wanted=1, updated=1, ready=1), "Healthy", "Current", ""),
    "an older revision serves": (service(FINE | {"Progressing": MOVES}, updated=1), "Progressing", "Current", "1 of 2"),
    "a newer document": (service(FINE, seen=2), "Progressing", "InProgress", "has not seen"),
    "it starts": (service(FINE | {"Ready": ("False", "Starting", "0 of 2 decode"), "Progressing": MOVES}),
                  "Progressing", "InProgress", "Starting: 0 of 2"),
    "refused while the last one serves": (
        service(FINE | {"Valid": ("False", "Invalid", "spec.decode"), "Stalled": ("True", "Invalid", "spec.decode"),
                        "Degraded": ("True", "Invalid", "spec.decode")}), "Degraded", "Failed", "Invalid: spec.decode"),
    "one crashes, others serve": (service(FINE | {"Degraded": ("True", "CrashLoop", "qwen-e2: ended")}),
                                  "Degraded", "Current", "CrashLoop: qwen-e2"),
    "stuck": (service(FINE | {"Ready": ("False", "Crashed", "0 of 2"), "Progressing": ("False", "Stuck", "in trouble"),
                              "Stalled": ("True", "Stuck", "in trouble")}), "Degraded", "Failed", "Stuck: in trouble"),
}

REST: Conditions = {"Suspended": ("True", "Suspended", "nothing runs"),
                    "Progressing": ("False", "Suspended", "nothing runs"),
                    "Degraded": FINE["Degraded"], "Valid": FINE["Valid"]}
ENDS = ("False", "Suspending", "these end: qwen-e1")
STATES |= {
    "suspended": (service(REST, wanted=0, ready=0, updated=0), "Suspended", "Current", "nothing runs"),
    "its instances end": (
        service({"Ready": ENDS, "Suspended": ENDS, "Progressing": ("True", *ENDS[1:])} | {
            kind: FINE[kind] for kind in ("Degraded", "Valid")}, wanted=0),
        "Progressing", "InProgress", "Suspending: these"),
    "suspended, and refused": (
        service(REST | {"Valid": ("False", "Invalid", "spec.decode"), "Stalled": ("True", "Invalid", "spec.decode")}),
        "Degraded", "Failed", "Invalid: spec.decode"),
    "resumed, and not yet looked at": (service(REST, seen=2), "Progressing", "InProgress", "has not seen"),
}


@needs_judge
@pytest.mark.parametrize("state", STATES)
def test_health(state: str) -> None:
    live, health, flux, words = STATES[state]
    assert JUDGE is not None
    said = JUDGE.of(live)
    assert (said.health, said.flux) == (health, flux)
    assert words in said.message


@needs_judge
def test_a_service_that_nobody_has_looked_at() -> None:
    bare = {key: value for key, value in service(FINE).items() if key != "status"}
    assert JUDGE is not None
    said = JUDGE.of(bare)
    assert (said.health, said.flux) == ("Progressing", "Current"), "kstatus takes what has no status for current"
    assert JUDGE.of(None, bare).health == "Missing"


@needs_judge
def test_status_and_what_others_annotate_are_no_difference_and_a_field_is() -> None:
    live = service(FINE)
    live["spec"] = {"decode": {"scaling": {"min": 1, "max": 4}}}
    target = {key: value for key, value in live.items() if key != "status"}
    live["metadata"] |= {"uid": "1", "resourceVersion": "7", "annotations": {"somebody.example/else": "x"}}
    assert JUDGE is not None
    assert JUDGE.of(live, target).synced
    target["spec"] = {"decode": {"scaling": {"min": 1, "max": 5}}}
    assert not JUDGE.of(live, target).synced


def test_the_script_is_a_patch_of_argo_cds_settings() -> None:
    assert list(yaml.safe_load(SETTINGS.read_text())["data"]) == ["resource.customizations.health.xpyd.dev_DisaggService"]
    assert str(SETTINGS.relative_to(PAGE.parents[1])) in PAGE.read_text()
