"""Every example is right, for the place it is made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from xpyd_operator.api.load import documents
from xpyd_operator.api.model import Engine
from xpyd_operator.api.rule import Target
from xpyd_operator.cli.check import check
from xpyd_operator.cli.documents import load_service

EXAMPLES = Path(__file__).parents[2] / "examples"
LOCAL = sorted((EXAMPLES / "local").glob("*.yaml"))
CASES = sorted((EXAMPLES / "kubernetes" / "cases").glob("*.yaml"))
KUBERNETES = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))


@pytest.mark.parametrize(
    ("path", "target"),
    [(path, Target.LOCAL) for path in LOCAL] + [(path, Target.KUBERNETES) for path in KUBERNETES],
    ids=lambda value: value.name if isinstance(value, Path) else str(value),
)
def test_check_finds_nothing(path: Path, target: Target) -> None:
    reports = check(str(path), target)
    assert reports
    assert [(report.faults, report.notes) for report in reports] == [((), ())] * len(reports)
    assert any(report.kind == "DisaggService" for report in reports)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.name)
def test_check_refuses_no_case(path: Path) -> None:
    """Notes may say what is added, such as a GPU; other objects beside the service are passed over."""
    reports = [report for report in check(str(path), Target.KUBERNETES) if report.kind == "DisaggService"]
    assert [report.faults for report in reports] == [()]


@pytest.mark.parametrize("path", [*LOCAL, *CASES, *KUBERNETES], ids=lambda path: path.name)
def test_it_opens_with_a_comment_that_says_what_it_shows(path: Path) -> None:
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("shape", ["1p1d", "1p3d", "3p1d"])
def test_file_names_say_the_shape(shape: str) -> None:
    assert load_service(str(EXAMPLES / "local" / f"{shape}.yaml")).shape.lower() == shape
    value = documents((EXAMPLES / "kubernetes" / f"{shape}.yaml").read_text())[0].value
    assert f"{value['spec']['prefill']['replicas']}p{value['spec']['decode']['replicas']}d" == shape


@pytest.mark.parametrize("path", LOCAL, ids=lambda path: path.name)
def test_local_examples_serve_the_model_of_the_repository(path: Path) -> None:
    service = load_service(str(path))
    assert service.spec.model.source == str(EXAMPLES / "model" / "weights")
    assert "--enforce-eager" in service.spec.engine.args
    assert service.spec.engine.image == Engine().image
