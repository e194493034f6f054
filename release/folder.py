"""A release as a folder, and whether one is whole.

    OUT/dist/…                      wheels (house)
        crds.yaml  install.yaml     for kubectl, images by digest (manifests)
        xpyd-VERSION.tgz            for helm
        sbom/xpyd-IMAGE-PLATFORM.cdx.json
        provenance.dsse.json        SLSA, signed (provenance)
        SHA256SUMS                  of all of the above
        SHA256SUMS.sig              by ssh-keygen -Y (signing)
        allowed_signers             of a rehearsal alone: a release's verifiers have the key from elsewhere

Equal commits and images give equal bytes, except signatures with another key.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from images import inputs
from images.tools import ROOT, ImageError, run

from release import bill, house, manifests, provenance, signing, toolbox

SUMS, ENVELOPE, SIGNERS = "SHA256SUMS", "provenance.dsse.json", "allowed_signers"
UNSUMMED = {SUMS, f"{SUMS}.sig", SIGNERS}
MATERIALS = ("requirements/release.txt", *(f"requirements/{kind}-image-{platform}.txt" for kind in (
    "operator", "sidecar", "engine") for platform in ("amd64", "arm64")))
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0][^\0]*)")


def build(out: Path, images: Path, kubectl: str, key: Path | None, builder: str) -> list[Path]:
    """Build everything into a new folder, sign and verify it; its files.

    ``images``: what ``python -m images push`` has printed. ``key``: None for a rehearsal, with a key that is made for it
    and thrown away; then the checkout may have changes. ``builder``: a URI of who builds.

    Raises:
        ImageError: something failed; the folder is not made then.
    """
    if out.exists():
        raise ImageError(f"{out} exists: a release is made into a new folder")
    version, wanted = inputs.version(), manifests.images(images)
    commit = source(clean=key is not None)
    tools = toolbox.python()
    with toolbox.temporary("folder") as name:
        work = Path(name) / "out"
        wheels = house.build(work / "dist")
        manifests.write(work, wanted, version, kubectl)
        bill.write(work / "sbom", wheels, tools)
        if key is None:
            key = signing.throwaway(Path(name))
            (work / SIGNERS).write_text(signing.signers_of(key))
        said = provenance.statement(
            sums(work), version=version, commit=commit, builder=builder,
            images={f"{each.repository}:{version}": each.digest for each in wanted.values()},
            materials={path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest() for path in MATERIALS})
        asked = Path(name) / "statement.json"
        asked.write_text(json.dumps(said, sort_keys=True))
        run([str(tools), provenance.__file__, "sign", str(key), str(asked), str(work / ENVELOPE)], env={"PYTHONPATH": ""})
        (work / SUMS).write_text("".join(f"{digest}  {path}\n" for path, digest in sums(work).items()))
        signing.sign(key, work / SUMS)
        signers = Path(name) / SIGNERS
        signers.write_text(signing.signers_of(key))
        verify(work, signers, tools)
        shutil.copytree(work, out)
    return sorted(path for path in out.rglob("*") if path.is_file())


def source(*, clean: bool) -> str:
    """The commit of this checkout.

    Raises:
        ImageError: there is none, or ``clean`` is asked for and files differ from it.
    """
    commit = run(["git", "rev-parse", "HEAD"], folder=ROOT).strip()
    if clean and (changed := run(["git", "status", "--porcelain"], folder=ROOT).strip()):
        raise ImageError(f"a release is built from a commit alone, and these differ: {changed[:500]}")
    return commit


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file of a release by its path, in order, without what `UNSUMMED` names."""
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()
            for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*")
                                     if path.is_file()) if name not in UNSUMMED}


def verify(folder: Path, signers: Path, tools: Path) -> str:
    """Look whether a folder is just what its signed sums and its provenance say; the commit that it is from.

    ``signers``: the file with the key that is trusted. ``tools``: from `toolbox.python`.

    Raises:
        ImageError: a signature is not by that key, a file is missing, different or not of the release, or a document is
            not of its form.
    """
    signing.verify(signers, folder / SUMS)
    listed = _listed(folder / SUMS)
    found = sums(folder)
    if wrong := sorted(name for name in listed.keys() | found.keys() if listed.get(name) != found.get(name)):
        raise ImageError(f"not as {SUMS} says: {', '.join(_fault(name, listed, found) for name in wrong[:10])}")
    statement = json.loads(run([str(tools), provenance.__file__, "verify", str(signers), str(folder / ENVELOPE)],
                               env={"PYTHONPATH": ""}))
    commit = _judge(statement, {name: digest for name, digest in found.items() if name != ENVELOPE})
    bill.check(sorted((folder / "sbom").glob("*.json")), tools)
    return commit


def _listed(path: Path) -> dict[str, str]:
    lines = [_LINE.fullmatch(line) for line in path.read_text().splitlines()]
    if not lines or None in lines:
        raise ImageError(f"{path.name} is not what sha256sum writes")
    return {line[2]: line[1] for line in lines if line is not None}


def _fault(name: str, listed: dict[str, str], found: dict[str, str]) -> str:
    return f"{name} is {'missing' if name not in found else 'not listed' if name not in listed else 'different'}"


def _judge(statement: Any, files: dict[str, str]) -> str:
    """The commit of a statement that is about just these files."""
    try:
        subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
        (source_,) = (each for each in statement["predicate"]["buildDefinition"]["resolvedDependencies"]
                      if each["name"] == "source")
        commit, kinds = str(source_["digest"]["gitCommit"]), (statement["_type"], statement["predicateType"])
    except (KeyError, TypeError, ValueError) as error:
        raise ImageError(f"{ENVELOPE} is no provenance of a release: {error!r}") from None
    if kinds != (provenance.STATEMENT, provenance.PREDICATE):
        raise ImageError(f"{ENVELOPE} holds a statement of another kind: {kinds}")
    if subjects != files:
        wrong = sorted(name for name in subjects.keys() | files.keys() if subjects.get(name) != files.get(name))
        raise ImageError(f"{ENVELOPE} is of other files: {', '.join(wrong[:10])}")
    return commit


def default_builder() -> str:
    """A URI for a build by hand."""
    return f"urn:xpyd:builder:hand:python-{sys.version_info.major}.{sys.version_info.minor}"
