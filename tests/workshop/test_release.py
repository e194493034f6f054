"""A rehearsal of a release: everything is made, signed with a key of its own, and verified; what was changed is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from images import inputs
from images.tools import ROOT, ImageError
from release import __main__ as command
from release import folder, manifests, provenance, signing, toolbox
from scripts import load

VERSION = inputs.version()
DIGESTS = {"xpyd-operator": f"sha256:{'a' * 64}", "xpyd-sidecar": f"sha256:{'b' * 64}"}
TEAM = "registry.example:5000/team"
KUBECTL = load(ROOT / "scripts/manifests.py").kubectl()
pytestmark = pytest.mark.timeout(3600)


def written(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if KUBECTL is None:
        pytest.skip("there is no kubectl")
    place = tmp_path_factory.mktemp("release")
    images = written(place / "images.json", {f"{TEAM}/{name}:{VERSION}": digest for name, digest in DIGESTS.items()})
    assert command.main(["build", str(place / "out"), "--images", str(images), "--rehearse", "--kubectl", KUBECTL]) == 0
    return place / "out"


@pytest.fixture
def copy(rehearsed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rehearsed, tmp_path / "out"))


def test_a_rehearsal_is_verified_by_the_command_and_by_everybodys_tools(rehearsed: Path) -> None:
    signers = rehearsed / folder.SIGNERS
    assert command.main(["verify", str(rehearsed), "--signers", str(signers)]) == 0
    with (rehearsed / folder.SUMS).open("rb") as sums:
        said = subprocess.run(["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "release", "-n", "xpyd-release",
                               "-s", f"{rehearsed / folder.SUMS}.sig"], stdin=sums, capture_output=True, text=True,
                              check=True)
    assert "Good" in said.stdout
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", folder.SUMS], cwd=rehearsed, check=True)


def test_what_is_applied_names_images_by_digest_and_nothing_else_changes(rehearsed: Path) -> None:
    made = list(yaml.safe_load_all((rehearsed / "install.yaml").read_text()))
    base = list(yaml.safe_load_all((ROOT / "manifests/install.yaml").read_text()))
    (here,), (there,) = ([each["spec"]["template"]["spec"]["containers"][0] for each in documents
                          if each["kind"] == "Deployment"] for documents in (made, base))
    assert here["image"] == f"{TEAM}/xpyd-operator@{DIGESTS['xpyd-operator']}"
    (sidecar,) = (each["value"] for each in here["env"] if each["name"] == "XPYD_SIDECAR_IMAGE")
    assert sidecar == f"{TEAM}/xpyd-sidecar@{DIGESTS['xpyd-sidecar']}"
    there["image"] = here["image"]
    next(each for each in there["env"] if each["name"] == "XPYD_SIDECAR_IMAGE")["value"] = sidecar
    assert made == base
    crds = [each["metadata"]["name"] for each in yaml.safe_load_all((rehearsed / "crds.yaml").read_text())]
    assert crds == ["disaggpools.xpyd.dev", "disaggservices.xpyd.dev"]


def test_the_chart_is_that_of_the_repository_but_for_the_images(rehearsed: Path) -> None:
    with tarfile.open(rehearsed / f"xpyd-{VERSION}.tgz") as archive:
        found = {entry.name: archive.extractfile(entry).read() for entry in archive}  # type: ignore[union-attr]
    chart = ROOT / "charts/xpyd"
    wanted = {f"xpyd/{path.relative_to(chart)}": path.read_bytes() for path in chart.rglob("*") if path.is_file()}
    assert {name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)} == {"xpyd/values.yaml"}
    values = yaml.safe_load(found["xpyd/values.yaml"])
    assert values["image"]["digest"] == DIGESTS["xpyd-operator"]
    assert values["sidecar"]["image"]["repository"] == f"{TEAM}/xpyd-sidecar"
    again = written(rehearsed.parent / "again.json", {f"{TEAM}/{name}:9": digest for name, digest in DIGESTS.items()})
    assert manifests.chart(manifests.images(again)) == (rehearsed / f"xpyd-{VERSION}.tgz").read_bytes()


def test_bills_of_materials_have_every_pin_and_our_own_wheels(rehearsed: Path) -> None:
    names = {path.name for path in (rehearsed / "sbom").iterdir()}
    assert names == {f"xpyd-{image}-{platform}.cdx.json"
                     for image in ("operator", "sidecar") for platform in ("amd64", "arm64")}
    bill = json.loads((rehearsed / "sbom/xpyd-operator-arm64.cdx.json").read_text())
    found = {each["name"]: each.get("version") for each in bill["components"]}
    assert (found["xpyd-operator"], found["xpyd-sidecar"]) == (VERSION, VERSION)
    pins = [line.partition("==") for line in (ROOT / "requirements/operator-image-arm64.txt").read_text().splitlines()
            if "==" in line and not line.startswith((" ", "#"))]
    assert {name: found.get(name) for name, _, _ in pins} == {name: version.split()[0] for name, _, version in pins}


def test_provenance_names_commit_images_and_every_file(rehearsed: Path) -> None:
    tools = toolbox.python()
    done = subprocess.run([str(tools), provenance.__file__, "verify", str(rehearsed / folder.SIGNERS),
                           str(rehearsed / folder.ENVELOPE)], capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert {each["name"] for each in said["subject"]} == folder.sums(rehearsed).keys() - {folder.ENVELOPE}
    definition = said["predicate"]["buildDefinition"]
    assert definition["externalParameters"]["images"] == {
        f"{TEAM}/{name}:{VERSION}": digest for name, digest in DIGESTS.items()}
    assert definition["resolvedDependencies"][0]["digest"]["gitCommit"] == folder.source(clean=False)


def _changed(out: Path) -> None:
    (out / "install.yaml").write_text((out / "install.yaml").read_text().replace("replicas: 2", "replicas: 1"))


def _listed_anew(out: Path) -> None:
    """Who changes a file and its sum cannot sign."""
    _changed(out)
    (out / folder.SUMS).write_text("".join(f"{digest}  {path}\n" for path, digest in folder.sums(out).items()))


def _signed_by_another(out: Path) -> None:
    _listed_anew(out)
    signing.sign(signing.throwaway(out.parent), out / folder.SUMS)


@pytest.mark.parametrize(("change", "said"), [
    (_changed, r"install\.yaml is different"),
    (lambda out: (out / "crds.yaml").unlink(), r"crds\.yaml is missing"),
    (lambda out: (out / "dist/more.whl").touch(), r"dist/more\.whl is not listed"),
    (_listed_anew, "is no signature of it"),
    (_signed_by_another, "is no signature of it"),
    (lambda out: (out / f"{folder.SUMS}.sig").unlink(), "is no signature of it"),
], ids=["changed", "missing", "more", "listed-anew", "signed-by-another", "unsigned"])
def test_a_folder_that_is_not_what_was_signed_is_refused(copy: Path, change: Callable[[Path], object], said: str) -> None:
    trusted = copy.parent / "trusted"
    shutil.copy(copy / folder.SIGNERS, trusted)
    change(copy)
    with pytest.raises(ImageError, match=said):
        folder.verify(copy, trusted, toolbox.python())


def test_a_signed_envelope_of_other_files_is_refused() -> None:
    said = provenance.statement({"a": "1"}, version="1", commit="c", images={}, materials={}, builder="urn:x")
    assert folder._judge(said, {"a": "1"}) == "c"
    with pytest.raises(ImageError, match="of other files: a, b"):
        folder._judge(said, {"a": "2", "b": "3"})
    with pytest.raises(ImageError, match="another kind"):
        folder._judge(said | {"predicateType": "https://in-toto.io/other"}, {"a": "1"})
    with pytest.raises(ImageError, match="no provenance"):
        folder._judge({"subject": []}, {})


@pytest.mark.parametrize(("document", "said"), [
    ([], "must be what"), ({}, "names no xpyd-operator and no xpyd-sidecar"),
    ({"r/xpyd-operator:1": "sha256:1"}, "needs a repository and a digest"),
    ({f"{team}/xpyd-operator:1": DIGESTS["xpyd-operator"] for team in ("a", "b")}, "named twice")])
def test_images_without_a_digest_or_a_name_are_refused(tmp_path: Path, document: object, said: str) -> None:
    with pytest.raises(ImageError, match=said):
        manifests.images(written(tmp_path / "images.json", document))
    with pytest.raises(ImageError, match="No such file"):
        manifests.images(tmp_path / "none.json")


def test_images_may_be_what_a_build_or_a_push_has_printed(tmp_path: Path) -> None:
    pushed = {f"{TEAM}/{name}:{VERSION}": digest for name, digest in DIGESTS.items()}
    built: dict[str, Any] = {name.removeprefix("xpyd-"): {"image": f"{TEAM}/{name}:{VERSION}", "digest": digest}
                             for name, digest in DIGESTS.items()}
    found = manifests.images(written(tmp_path / "pushed.json", pushed))
    assert found == manifests.images(written(tmp_path / "built.json", built))
    assert found["xpyd-operator"] == manifests.Image(f"{TEAM}/xpyd-operator", DIGESTS["xpyd-operator"])


def test_a_release_goes_into_a_new_folder_from_a_commit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImageError, match="exists"):
        folder.build(tmp_path, tmp_path / "images.json", "kubectl", None, "urn:x")
    monkeypatch.setattr(folder, "run", lambda words, **_: "abc\n" if "rev-parse" in words else " M README.md\n")
    assert folder.source(clean=False) == "abc"
    with pytest.raises(ImageError, match=r"these differ: M README\.md"):
        folder.source(clean=True)
