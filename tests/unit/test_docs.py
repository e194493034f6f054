"""What the documentation names exists: headings, targets of make, metrics, reasons; and the services it shows are right."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.catalog import COMMANDS

from xpyd_operator.api.load import documents
from xpyd_operator.api.recognize import DocumentKind, recognize
from xpyd_operator.api.rule import Target
from xpyd_operator.kube.client.api import RESOURCES
from xpyd_operator.plan import news
from xpyd_operator.render.judge import judge

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = ROOT / "operator/src/xpyd_operator"
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
BESIDE = sorted((*ROOT.glob("bench/*.md"), *ROOT.glob("examples/**/*.md")))
INDEX = ROOT / "docs/README.md"
TROUBLES = ROOT / "docs/troubleshooting.md"
LOCAL = ROOT / "docs/guide.md"

NOT_REASONS = frozenset({
    # statuses and types of conditions and Events; Degraded, Ready, Compatible and Valid are reasons too
    "True", "False", "Normal", "Warning", "Progressing", "Limited", "Stalled", "Not",
    # conditions of Gateway API's own objects
    "Programmed", "ResolvedRefs",
    # a kind of three APIs, so that none of them has it among the operator's resources by this name
    "PodGroup",
    # what pods, containers and the API server say themselves
    "Completed", "ContainerCreating", "ContainersReady", "CrashLoopBackOff",
    "CreateContainerConfigError", "CreateContainerError",
    "DisruptionTarget", "ErrImageNeverPull", "ErrImagePull", "Error", "ImageInspectError", "ImagePullBackOff",
    "Initialized", "InvalidImageName", "NamespaceTerminating", "OOMKilled", "PodInitializing", "PodScheduled",
    "PodReadyToStartContainers", "PostStartHookError",
    "RegistryUnavailable", "ReplicaFailure", "RunContainerError", "SchedulingGated", "Succeeded",
    # errors of requests, headers, names of types
    "Accept", "All", "AlreadyExists", "Authorization", "Background", "BadAnswer", "BearerToken", "Revision", "Status",
    "Strict", "Timeout", "Unreachable",
    # settings
    "Always", "Complete", "Deployment", "IfNotPresent", "Never", "Sidecar",
})
"""Words of the code in the form of a reason that are none. A new word must be put here or be explained on the page."""

NOT_HERE = {
    ("CONTRIBUTING.md", "docs/decisions/NNNN-title.md"),
    *(("docs/development/vllm-versions.md", name) for name in (
        "distributed/kv_transfer/kv_connector/v1/base.py", "v1/worker/kv_connector_model_runner_mixin.py",
        "v1/worker/gpu/kv_connector.py", "v1/core/sched/scheduler.py")),
}
"""A name to be filled in, and files of vLLM."""


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Those within the repository: as written, where they lead, and the heading there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" not in target:
            name, _, anchor = target.partition("#")
            yield target, (page.parent / name).resolve() if name else page, anchor


@pytest.mark.parametrize("page", [*PAGES, *BESIDE], ids=short)
def test_links_lead_somewhere(page: Path) -> None:
    lost = [target for target, there, anchor in links(page)
            if not there.exists() or (anchor and anchor not in anchors(there))]
    assert lost == []


def test_every_page_is_found_from_the_index() -> None:
    """By links alone, and the index from the first page that anybody sees."""
    assert INDEX in {there for _, there, _ in links(ROOT / "README.md")}
    found, new = {INDEX}, [INDEX]
    while new:
        for _, there, _ in links(new.pop()):
            if there in PAGES and there not in found and there.is_relative_to(ROOT / "docs"):
                found.add(there)
                new.append(there)
    assert sorted(short(page) for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in found) == []


def test_the_index_itself_names_every_page_for_users() -> None:
    named = {there for _, there, _ in links(INDEX)}
    assert sorted(short(page) for page in ROOT.glob("docs/*.md") if page not in named | {INDEX}) == []
    assert sorted(short(page) for page in ROOT.glob("docs/protocols/*.md") if page not in named) == []


def test_the_architecture_names_every_package() -> None:
    """Each folder of the two packages that holds modules, but for data and what a package keeps within itself."""
    within = {"transport/nccl", "transport/nixl", "transport/shm", "transport/tcp"}  # links, told as one
    named = {there for _, there, _ in links(ROOT / "docs/architecture.md")}
    roots = (OPERATOR, ROOT / "sidecar/src/xpyd_sidecar")
    packages = {init.parent for root in roots for init in root.rglob("__init__.py")} - set(roots)
    assert sorted(short(each) for each in packages - named if not any(str(each).endswith(name) for name in within)) == []


def constants(module: Path) -> Iterator[str]:
    """The texts of a module, without docstrings."""
    tree = ast.parse(module.read_text())
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


def reasons() -> set[str]:
    """Reasons of conditions and Events: every word in their form, and those made from a condition's name."""
    modules = [*OPERATOR.glob("plan/*.py"), *OPERATOR.glob("kube/**/*.py")]
    words = {text for module in modules for text in constants(module) if re.fullmatch(r"(?=.*[a-z])[A-Z][A-Za-z]+", text)}
    made = {f"{prefix}{name}" for name in news._GOOD if name != "Progressing" for prefix in ("", "Not")}
    return (words - NOT_REASONS - RESOURCES.keys()) | made


def explained() -> set[str]:
    """First cells of the tables of reasons."""
    _, _, tables = TROUBLES.read_text().partition("## Reasons of Ready")
    rows = re.findall(r"^\| (`[^|]*) \|", tables, flags=re.MULTILINE)
    return {word for row in rows for word in re.findall(r"`(\w+)`", row)}


def test_the_words_of_the_code_are_found() -> None:
    assert {"AllReady", "ImagePull", "PoolScaledBack", "NotReady", "TemplateRejected"} <= reasons()


def test_every_reason_is_explained_and_no_other() -> None:
    assert explained() == reasons()


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    form = re.compile(r"(?:^|`)make ([a-z][a-z0-9-]*)", flags=re.MULTILINE)
    named = {(short(page), name) for page in PAGES for name in form.findall(page.read_text())}
    assert len(named) > 10
    assert sorted(each for each in named if each[1] not in targets) == []


def test_commands_of_the_lab_exist() -> None:
    form = re.compile(r"python3? -m lab (?:--fresh )?([a-z][a-z0-9-]*)")
    named = {(short(page), name) for page in PAGES for name in form.findall(page.read_text())}
    assert len(named) > 30
    assert sorted(each for each in named if each[1] not in COMMANDS) == []


def test_files_that_are_named_exist() -> None:
    """By their path from the top, or in quotes by that from a package or from the tests."""
    tops = "|".join(sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0].isalpha()))
    kinds = "py|pyi|c|h|js|go|sh|json|ya?ml|txt|in|md|toml|svg|png"
    whole = re.compile(rf"(?<![\w/.…*-])((?:{tops})/[\w./-]*\w\.(?:{kinds}))\b")
    part = re.compile(r"`((?:[a-z0-9_]+/)+[a-z0-9_]+\.(?:py|c|h|js))(?:::\w+)?`")
    below = [ROOT / each for each in (".", "tests", "lab/cluster", "operator/src/xpyd_operator",
                                      "sidecar/src/xpyd_sidecar", "sidecar/src/xpyd_sidecar/engine")]
    named = {(page, name) for page in PAGES if page.parent.name != "decisions"
             for form in (whole, part) for name in form.findall(page.read_text())}
    assert len(named) > 200
    lost = {(short(page), name) for page, name in named
            if not any((root / name).exists() for root in (*below, page.parent))}
    assert lost == NOT_HERE


def test_tests_that_are_named_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"((?:tests|e2e)/[\w/]+\.py)(?:::(\w+))?", text)
    assert {name.split("/")[1] if name.startswith("tests") else "e2e" for name, _ in named} == {
        "unit", "sockets", "component", "browser", "kube", "e2e"}
    for name, test in named:
        assert re.search(rf"^(?:async )?def {test or 'test_'}", (ROOT / name).read_text(), flags=re.MULTILINE), (name, test)


def test_metrics_exist() -> None:
    code = "".join(path.read_text() for path in ROOT.glob("*/src/**/*.py"))
    known = set(re.findall(r'"(xpyd_(?:operator|router|kv)_[a-z_]+)"', code))
    for page in (ROOT / "docs/operations.md", TROUBLES, ROOT / "docs/install.md", ROOT / "docs/kubernetes.md"):
        named = set(re.findall(r"\bxpyd_(?:operator|router|kv)_[a-z_]+", page.read_text()))
        assert {name for name in named - known if name.removesuffix("_total") not in known} == set(), page


def services() -> Iterator[tuple[str, object]]:
    for page in PAGES:
        for block in re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL):
            if re.search(r"^kind: DisaggService$", block, flags=re.MULTILINE):
                yield from ((short(page), each.value) for each in documents(block)
                            if recognize(each.value) is DocumentKind.SERVICE)


def test_services_that_are_shown_are_right_and_can_be_done() -> None:
    shown = list(services())
    assert len(shown) > 5
    for page, value in shown:
        target = Target.LOCAL if page == short(LOCAL) else Target.KUBERNETES
        found = judge(value, target)
        assert (found.refusals, found.warnings) == ((), ()), page


def test_every_claim_about_security_has_its_test() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/security.md").read_text()))
    there = {name for path in (*ROOT.glob("tests/**/*.py"), *ROOT.glob("e2e/**/*.py"))
             for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    assert len(named) > 20
    assert named <= there, sorted(named - there)
