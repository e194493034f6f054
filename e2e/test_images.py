"""The container images: what is in them, that they run unprivileged on a read-only root, and the way to a registry.

Everything here starts from the exported archives: what a cluster imports is what is tested. Images for another processor
than this machine's are built and run by `python -m lab campaign-arm64`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from images.platforms import native
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from processes import free_port

from xpyd_sidecar.contract.launch import KvOptions, kv_transfer_config

ROOT = Path(__file__).resolve().parent.parent
USER = 65532
PUBLISHED = ("operator", "sidecar")
pytestmark = pytest.mark.timeout(1200)

ENTER = """
root=$1; shift
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
while [ "$1" != -- ]; do
  mkdir -p "$root$2"
  mount --bind "$2" "$root$2"
  mount -o "remount,bind,$1" "$root$2"
  shift 2
done
shift
mount -o remount,bind,ro "$root"
exec setpriv --no-new-privs chroot --userspec=65532:65532 --groups= "$root" env -i "$@"
"""
"""What a container runtime does with readOnlyRootFilesystem, runAsUser and hostPath volumes, in a mount namespace."""


class Image(NamedTuple):
    """One archive with its unpacked, mounted root."""

    name: str
    archive: Path
    config: dict[str, Any]
    root: Path

    def command(self, *command: str, binds: Sequence[tuple[str, Path]] = (), env: Sequence[str] = ()) -> list[str]:
        """How to run ``command``, or the image's own entry point with ``-…`` arguments, inside it."""
        if not command or command[0].startswith("-"):
            command = (*self.config["Entrypoint"], *command)
        mounts = [word for mode, path in binds for word in (mode, str(path))]
        return ["unshare", "--mount", "--propagation", "private", "sh", "-euc", ENTER, "enter", str(self.root), *mounts,
                "--", *self.config["Env"], *env, *command]

    def run(self, *command: str, binds: Sequence[tuple[str, Path]] = (),
            env: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(*command, binds=binds, env=env), capture_output=True, text=True, timeout=120,
                              check=False)


def unpack(archive: Path, folder: Path) -> Path:
    """An archive's image as a root; it has one platform and no whiteouts."""
    with tarfile.open(archive) as tar:
        for layer in manifest_of(tar)["layers"]:
            file = tar.extractfile(f"blobs/{layer['digest'].replace(':', '/')}")
            with tarfile.open(fileobj=file) as files:
                files.extractall(folder, filter=lambda member, _: member)
    return folder


class Images(NamedTuple):
    """``python -m images`` on a copy of its inputs: an edit while the tests run must not start a build."""

    folder: Path

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "images", *arguments], cwd=self.folder, capture_output=True, text=True,
                              timeout=900, check=False)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    copy = tmp_path_factory.mktemp("inputs")
    for name in ("images", "requirements", "operator", "sidecar", "distribution"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return Images(copy)


@pytest.fixture(scope="module")
def built(images: Images) -> dict[str, dict[str, Any]]:
    done = images("build")
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert set(result) == {*PUBLISHED, "engine-cpu"}
    return result


@pytest.fixture(scope="module")
def unpacked(built: dict[str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Image]]:
    folder = tmp_path_factory.mktemp("roots")
    archives = {name: Path(image["archive"]) for name, image in built.items()}
    yield {name: Image(name, path, config_of(path), unpack(path, folder / name)) for name, path in archives.items()}
    shutil.rmtree(folder)


@pytest.fixture(params=[*PUBLISHED, "engine-cpu"])
def image(request: pytest.FixtureRequest, unpacked: dict[str, Image]) -> Image:
    return unpacked[request.param]


@pytest.fixture
def operator(unpacked: dict[str, Image]) -> Image:
    return unpacked["operator"]


@pytest.fixture
def sidecar(unpacked: dict[str, Image]) -> Image:
    return unpacked["sidecar"]


def blob(archive: tarfile.TarFile, digest: str) -> Any:
    file = archive.extractfile(f"blobs/{digest.replace(':', '/')}")
    assert file is not None
    return json.load(file)


def manifest_of(archive: tarfile.TarFile) -> dict[str, Any]:
    index = archive.extractfile("index.json")
    assert index is not None
    manifest: dict[str, Any] = blob(archive, json.load(index)["manifests"][0]["digest"])
    return manifest


def config_of(path: Path) -> dict[str, Any]:
    with tarfile.open(path) as archive:
        config: dict[str, Any] = blob(archive, manifest_of(archive)["config"]["digest"])["config"]
    return config


def test_the_archive_names_its_image(built: dict[str, dict[str, Any]]) -> None:
    for name, image in built.items():
        with tarfile.open(image["archive"]) as archive:
            index = archive.extractfile("index.json")
            assert index is not None
            (manifest,) = json.load(index)["manifests"]
        assert manifest["annotations"]["org.opencontainers.image.ref.name"] == image["image"]
        assert image["image"].startswith(f"localhost/xpyd-{name}:0.")
        assert image["bytes"] == Path(image["archive"]).stat().st_size < 120 << 20


def test_what_the_image_says_of_itself(image: Image) -> None:
    labels = {key.removeprefix("org.opencontainers.image."): value for key, value in image.config["Labels"].items()}
    assert labels["title"] == f"xpyd-{image.name}"
    assert labels["version"] == image.archive.name.removeprefix(f"xpyd-{image.name}-").rpartition("-")[0]
    assert labels["licenses"] == "Apache-2.0"
    assert image.config["User"] == f"{USER}:{USER}"
    assert image.config["StopSignal"] == "SIGTERM"
    assert isinstance(image.config["Entrypoint"], list)
    assert "/bin/sh" not in [*image.config["Entrypoint"], *image.config.get("Cmd", [])]


def test_no_tools_caches_or_traces_of_the_build(image: Image, images: Images) -> None:
    kept: set[Path] = set()
    if image.name == "engine-cpu":  # the folders that this checkout is mounted on, wherever it lies
        for mount in json.loads(images("paths").stdout)["mounts"]:
            point = image.root / mount["path"].lstrip("/")
            kept |= {point, *point.parents}
    folders = ("usr/bin", "usr/local/bin", "opt/xpyd/bin")
    programs = {path.name for folder in folders for path in (image.root / folder).glob("*")}
    assert "python3" in programs
    assert not programs & {"gcc", "cc", "g++", "make", "pip", "pip3", "git", "curl"}
    for gone in ("build", "etc/apt/sources.list", "etc/hostname", "etc/resolv.conf"):
        assert not (image.root / gone).exists() or (image.root / gone).stat().st_size == 0, gone
    for folder in ("root/.cache", "var/cache/apt", "var/lib/apt/lists", "tmp", "var/log"):
        assert not set((image.root / folder).rglob("*")) - kept, folder
    assert not list(image.root.glob("opt/xpyd/lib/python*/site-packages/pip"))
    assert not list(image.root.glob("opt/xpyd/lib/python*/site-packages/*/direct_url.json"))


def test_nobody_but_root_can_change_the_image(image: Image) -> None:
    script = "import os, sys; print(os.getuid(), os.getgid(), os.getgroups()); open('/tmp/x', 'w'); open('/etc/x', 'w')"
    done = image.run("python3", "-c", script)
    assert done.stdout.split("\n")[0] == f"{USER} {USER} []", done.stderr
    assert "OSError: [Errno 30] Read-only file system: '/etc/x'" in done.stderr
    assert "/tmp/x" not in done.stderr
    for path in (image.root / "opt", image.root / "etc"):
        writable = [file for file in path.rglob("*") if not file.is_symlink() and file.lstat().st_mode & 0o002]
        assert writable == []


def test_the_operator_checks_an_example(operator: Image, tmp_path: Path) -> None:
    """From a folder of its own: the image has /root for root alone, and a checkout may lie below it."""
    example = (ROOT / "examples" / "kubernetes" / "1p3d.yaml").read_text()
    tmp_path.chmod(0o755)
    (tmp_path / "right.yaml").write_text(example)
    (tmp_path / "wrong.yaml").write_text(example.replace("replicas:", "replica:", 1))
    with Readable(tmp_path):
        done = operator.run("xpyd", "check", "-f", str(tmp_path / "right.yaml"), binds=[("ro", tmp_path)])
        assert done.returncode == 0, done.stderr
        done = operator.run("xpyd", "check", "-f", str(tmp_path / "wrong.yaml"), binds=[("ro", tmp_path)])
    assert done.returncode == 1, done.stderr
    assert "replica" in done.stdout + done.stderr


def test_byte_code_is_complete_and_used(operator: Image) -> None:
    """A root that cannot be written would have every start compile what is missing."""
    done = operator.run("python", "-v", "-c", "import kopf, xpyd_operator.loop, xpyd_sidecar.contract.launch")
    assert done.returncode == 0, done.stderr
    for folder in ("/opt/xpyd", "/usr/lib/python3"):
        assert f"code object from {folder}" not in done.stderr
        assert f"code object from '{folder}" in done.stderr


def test_what_packages_ask_for_is_there(operator: Image, sidecar: Image) -> None:
    """What ``pip check`` would say."""
    for image in (operator, sidecar):
        (site,) = image.root.glob("opt/xpyd/lib/python3.*/site-packages")
        found = list(importlib.metadata.distributions(path=[str(site)]))
        versions = {canonicalize_name(each.metadata["Name"]): each.version for each in found}
        assert {"xpyd-sidecar", "msgspec", "pyzmq"} <= set(versions)
        for each in found:
            for requirement in map(Requirement, each.requires or ()):
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    assert canonicalize_name(requirement.name) in versions, (each.name, str(requirement))
                    there = versions[canonicalize_name(requirement.name)]
                    assert requirement.specifier.contains(there, prereleases=True), (each.name, str(requirement), there)


def test_certificates_and_names_are_there(operator: Image) -> None:
    script = """
import pwd, socket, ssl
print(len(ssl.create_default_context().get_ca_certs()) > 50, pwd.getpwuid(65532).pw_name, socket.getservbyname("https"))
"""
    done = operator.run("python", "-c", script)
    assert done.stdout.split() == ["True", "xpyd", "443"], done.stderr
    lines = (operator.root / "etc/nsswitch.conf").read_text().splitlines()
    hosts = next(line.split() for line in lines if line.startswith("hosts:"))
    assert hosts[1:3] == ["files", "dns"], "names of /etc/hosts come first"


def test_the_sidecar_names_what_is_wrong(sidecar: Image) -> None:
    done = sidecar.run("--config-json", "{}")
    assert done.returncode == 2
    assert "missing required field `service`" in done.stderr


def test_the_sidecar_routes_and_ends_at_sigterm(sidecar: Image, tmp_path: Path) -> None:
    port, members, admin = free_port(), free_port(), free_port()
    (tmp_path / "key").write_text("ab" * 32)
    os.chown(tmp_path / "key", USER, USER)
    os.chown(tmp_path, USER, USER)
    (tmp_path / "key").chmod(0o600)
    config = {"service": "test", "instance": "test-r0", "key_file": str(tmp_path / "key"), "run_dir": str(tmp_path),
              "router": {"port": port, "members_port": members, "admin_port": admin}}
    with Readable(tmp_path):
        process = subprocess.Popen(sidecar.command("--config-json", json.dumps(config), binds=[("rw", tmp_path)]),
                                   stderr=subprocess.PIPE, text=True)
        try:
            assert status(f"http://127.0.0.1:{port}/health", process) == 200
            assert Path(f"/proc/{process.pid}/exe").resolve().name.startswith("python")
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 0, err


def test_an_engine_finds_the_connector_with_pythonpath_alone(images: Images, unpacked: dict[str, Image],
                                                             tmp_path: Path) -> None:
    target, engine = tmp_path / "xpyd", unpacked["engine-cpu"]
    target.mkdir()
    target.chmod(0o777)  # as an emptyDir is
    done = images("paths")
    assert done.returncode == 0, done.stderr
    paths = json.loads(done.stdout)
    binds = [("ro", Path(mount["path"])) for mount in paths["mounts"]]
    script = """
import importlib.metadata, json, sys
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.config import KVTransferConfig
found = KVConnectorFactory.get_connector_class(KVTransferConfig(**json.loads(sys.argv[1])))
import xpyd_sidecar, xxhash, vllm, torch, sqlite3, ssl, lzma, bz2, readline, ctypes, uuid, curses
print(found.__name__, sys.modules[found.__module__].__file__, xpyd_sidecar.__file__, xxhash.__file__,
      importlib.metadata.distribution("xpyd-sidecar").locate_file(""), vllm.__file__, sep="\\n")
"""
    with Readable(tmp_path):
        for said in ("copied", "already in place"):
            done = unpacked["sidecar"].run("python", "-m", "xpyd_sidecar.install", str(target), binds=[("rw", target)])
            assert done.returncode == 0, done.stderr
            assert done.stdout.rstrip().endswith(said)
        without = engine.run(paths["python"], "-c", "import xpyd_sidecar", binds=binds)
        assert "No module named 'xpyd_sidecar'" in without.stderr, "the environment's own copy must not be reachable"
        config = json.dumps(kv_transfer_config(KvOptions(), "recompute"))
        done = engine.run(paths["python"], "-c", script, config, binds=[*binds, ("ro", target)],
                          env=[f"PYTHONPATH={target}"])
        usage = engine.run("--help", binds=binds)
    assert usage.returncode == 0, usage.stderr[-3000:]
    assert "--kv-transfer-config" in usage.stdout
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.strip().splitlines()[-6:]
    assert lines[0] == "XpydConnector"
    for line in lines[1:5]:
        assert line.startswith(str(target)), lines
    assert lines[5].startswith(paths["mounts"][0]["path"])
    assert {path.name for path in target.glob("xxhash/_xxhash.cpython-*.so")} >= {
        f"_xxhash.cpython-{version}-{platform.machine()}-linux-gnu.so" for version in (311, 312, 313, 314)}
    assert {path.stat().st_uid for path in target.rglob("*")} == {USER}


def test_an_install_that_cannot_be_written_fails(sidecar: Image, tmp_path: Path) -> None:
    os.chown(tmp_path, USER, USER)
    with Readable(tmp_path):
        done = sidecar.run("python", "-m", "xpyd_sidecar.install", str(tmp_path), binds=[("ro", tmp_path)])
    assert done.returncode == 1
    assert "Read-only file system" in done.stderr
    done = sidecar.run("python", "-m", "xpyd_sidecar.install", "/opt/xpyd")
    assert done.returncode == 1
    assert "give another folder" in done.stderr


def processor_s() -> float:
    """What commands that have ended have computed, however long they waited for a processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_second_build_does_nothing(images: Images, built: dict[str, dict[str, Any]]) -> None:
    before = {name: Path(image["archive"]).stat().st_mtime_ns for name, image in built.items()}
    start = processor_s()
    again = images("build")
    took = processor_s() - start
    assert json.loads(again.stdout) == built
    assert {name: Path(image["archive"]).stat().st_mtime_ns for name, image in built.items()} == before
    assert again.stderr == ""
    assert took < 3


def test_the_same_inputs_make_the_same_digest(images: Images, built: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    """On the same base and the same downloads, everything else anew, the compiler's work too."""
    for name in ("layers", "wheels"):
        (tmp_path / name).symlink_to(Path(built["sidecar"]["archive"]).parent / name)
    done = images("build", "sidecar", "--cache", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sidecar"]["digest"] == built["sidecar"]["digest"]


@pytest.mark.parametrize("fault", ["no python3", "no wheels", "no image"])
def test_a_build_that_fails_says_why_and_leaves_nothing(images: Images, built: dict[str, Any], tmp_path: Path,
                                                         fault: str) -> None:
    base, cache = "localhost/base:1", tmp_path / "cache"
    if fault == "no python3":
        base = f"oci-archive:{without_python(Path(built['engine-cpu']['archive']), tmp_path / 'base.tar')}"
    elif fault == "no wheels":
        base = f"oci-archive:{built['engine-cpu']['archive']}"
        for folder in (Path(built["sidecar"]["archive"]).parent / "wheels").iterdir():
            (cache / "wheels" / folder.name).mkdir(parents=True)
    done = images("build", "sidecar", "--base", base, "--cache", str(cache))
    assert done.returncode == 1
    assert done.stdout == ""
    assert {"no python3": "no python3", "no wheels": "has 0 wheels", "no image": "localhost/base"}[fault] in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in cache.iterdir()} <= {"lock", "wheels"}


def test_another_base_is_built_upon(images: Images, built: dict[str, Any], tmp_path: Path) -> None:
    """An image that a registry might have: nothing of it runs while the build looks at it."""
    (tmp_path / "wheels").symlink_to(Path(built["sidecar"]["archive"]).parent / "wheels")
    base = f"oci-archive:{built['engine-cpu']['archive']}"
    done = images("build", "sidecar", "--base", base, "--cache", str(tmp_path))
    assert done.returncode == 0, done.stderr
    archive = Path(json.loads(done.stdout)["sidecar"]["archive"])
    image = Image("sidecar", archive, config_of(archive), unpack(archive, tmp_path / "root"))
    assert "missing required field `service`" in image.run("--config-json", "{}").stderr


def without_python(archive: Path, made: Path) -> Path:
    """An archive of an image that has the settings of another, and no files."""
    with tarfile.open(archive) as old, tarfile.open(made, "w") as new:
        def add(name: str, data: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            new.addfile(entry, io.BytesIO(data))

        def put(content: dict[str, Any]) -> dict[str, Any]:
            data = json.dumps(content).encode()
            digest = hashlib.sha256(data).hexdigest()
            add(f"blobs/sha256/{digest}", data)
            return {"digest": f"sha256:{digest}", "size": len(data)}

        manifest = manifest_of(old)
        config = blob(old, manifest["config"]["digest"]) | {"rootfs": {"type": "layers", "diff_ids": []}, "history": []}
        described = manifest["config"] | put(config)
        top = put(manifest | {"config": described, "layers": []}) | {"mediaType": manifest["mediaType"]}
        add("index.json", json.dumps({"schemaVersion": 2, "manifests": [top]}).encode())
        add("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    return made


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A registry of this machine, from the distribution's package."""
    if shutil.which("docker-registry") is None:
        quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "-y", "--no-install-recommends", "docker-registry"]):
            subprocess.run(["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120", *words], env=quiet, check=True, timeout=200,
                           capture_output=True)
    port = free_port()
    (tmp_path / "registry.yml").write_text(json.dumps({
        "version": 0.1, "log": {"level": "error"}, "storage": {"filesystem": {"rootdirectory": str(tmp_path / "blobs")}},
        "http": {"addr": f"127.0.0.1:{port}"}}))
    with (tmp_path / "registry.log").open("w") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(tmp_path / "registry.yml")], stdout=log, stderr=log)
        try:
            assert status(f"http://127.0.0.1:{port}/v2/", process) == 200
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(timeout=120)


def test_a_registry_gets_operator_and_sidecar(images: Images, built: dict[str, Any], registry: str,
                                              tmp_path: Path) -> None:
    done = images("push", f"{registry}/team", "--insecure", "--platforms", native().name)
    assert done.returncode == 0, done.stderr
    pushed = json.loads(done.stdout)
    version = built["operator"]["image"].rpartition(":")[2].rpartition("-")[0]
    assert set(pushed) == {f"{registry}/team/xpyd-{name}:{version}" for name in PUBLISHED}
    assert set(pushed.values()) == {built[name]["digest"] for name in PUBLISHED}
    for name, digest in pushed.items():
        path = name.removeprefix(f"{registry}/").replace(":", "/manifests/")
        request = urllib.request.Request(f"http://{registry}/v2/{path}",
                                         headers={"Accept": "application/vnd.oci.image.manifest.v1+json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert answer.headers["Docker-Content-Digest"] == digest
    archive = tmp_path / "pulled.tar"
    subprocess.run(["skopeo", "--insecure-policy", "copy", "-q", "--src-tls-verify=false",
                    f"docker://{registry}/team/xpyd-operator:{version}", f"oci-archive:{archive}"], check=True, timeout=120)
    pulled = Image("operator", archive, config_of(archive), unpack(archive, tmp_path / "pulled"))
    assert pulled.run("xpyd", "--version").stdout == f"xpyd {version} (compiled)\n"


@pytest.mark.parametrize(("registry", "words"), [
    ("http://127.0.0.1:1", "is no registry"), ("", "is no registry"), ("127.0.0.1:1/team", "refused")])
def test_a_registry_that_cannot_be_reached_is_named(images: Images, built: dict[str, Any], registry: str,
                                                    words: str) -> None:
    done = images("push", registry, "--insecure")
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr


class Readable:
    """Lets other users pass through the private folders above a test's own while it runs."""

    def __init__(self, path: Path) -> None:
        modes = {folder: folder.stat().st_mode & 0o7777 for folder in path.parents}
        self._modes = {folder: mode for folder, mode in modes.items() if not mode & 0o001}

    def __enter__(self) -> None:
        for folder, mode in self._modes.items():
            folder.chmod(mode | 0o001)

    def __exit__(self, *_: object) -> None:
        for folder, mode in self._modes.items():
            folder.chmod(mode)


def status(url: str, process: subprocess.Popen[Any]) -> int:
    """HTTP status once somebody answers, within two minutes."""
    end = time.monotonic() + 120
    while process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=60) as answer:
                code: int = answer.status
                return code
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            assert time.monotonic() < end, f"nobody answers at {url}"
            time.sleep(0.05)
    pytest.fail(f"ended with {process.returncode}: {process.stderr.read() if process.stderr else ''}")
