"""What the operator is told when it starts, how it says that it was told wrong, and what its log lines carry."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from processes import free_port

from xpyd_operator.kube import app, logs
from xpyd_operator.kube.__main__ import parse
from xpyd_operator.kube.client.cache import WatchCache
from xpyd_operator.kube.client.login import Login, LoginError
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.client.reflector import Kopf
from xpyd_operator.kube.client.reflector import settings as kopf_settings
from xpyd_operator.kube.client.watch import Watch

IMAGE = ("--sidecar-image", "registry.example/xpyd-sidecar:0.1.0")


def test_only_the_image_is_needed() -> None:
    settings, login, elect = parse(IMAGE, {"POD_NAMESPACE": "here", "POD_NAME": "xpyd-operator-7"})
    assert settings.sidecar_image == IMAGE[1]
    assert settings.namespaces == ()
    assert (settings.operator_namespace, settings.lease_namespace, settings.lease_name) == ("here", "here", "xpyd-operator")
    assert (settings.lease_s, settings.resync_s, settings.http_port, settings.dry_run) == (10.0, 5.0, 8080, False)
    assert settings.identity.startswith("xpyd-operator-7_")
    assert login == Login()
    assert elect


def test_a_restarted_process_is_another_candidate() -> None:
    names = {parse(IMAGE, {"POD_NAME": "p"})[0].identity for _ in range(3)}
    assert len(names) == 3


def test_flags_win_over_the_environment() -> None:
    environment = {"XPYD_SIDECAR_IMAGE": "image:env", "XPYD_HTTP_PORT": "9000", "XPYD_NAMESPACE": "a, b",
                   "XPYD_DRY_RUN": "true", "XPYD_LOG_FORMAT": "text"}
    settings, _, _ = parse((), environment)
    assert (settings.sidecar_image, settings.http_port, settings.namespaces) == ("image:env", 9000, ("a", "b"))
    assert settings.dry_run
    assert settings.log_format == "text"
    assert settings.pod_user == "fixed"
    assert parse(("--pod-user", "assigned"), environment)[0].pod_user == "assigned"
    settings, _, elect = parse(("--http-port", "9001", "--namespace", "c", "--namespace", "d", "--namespace", "c",
                                "--no-leader-election", "--lease-namespace", "leases"), environment)
    assert (settings.http_port, settings.namespaces, settings.lease_namespace) == (9001, ("c", "d"), "leases")
    assert not elect


@pytest.mark.parametrize(("flags", "environment", "named"), [
    ((), {}, "--sidecar-image (or XPYD_SIDECAR_IMAGE) is required"),
    (("--sidecar-image", "two words"), {}, "argument --sidecar-image: 'two words' is not an image"),
    ((*IMAGE, "--http-port", "http"), {}, "argument --http-port: 'http' is not a port"),
    ((*IMAGE, "--http-port", "70000"), {}, "argument --http-port: '70000' is not a port"),
    (IMAGE, {"XPYD_HTTP_PORT": "0"}, "XPYD_HTTP_PORT: '0' is not a port"),
    ((*IMAGE, "--namespace", "Team_A"), {}, "argument --namespace: 'Team_A' is not a namespace"),
    (IMAGE, {"XPYD_NAMESPACE": "ok,Not"}, "XPYD_NAMESPACE: 'Not' is not a namespace"),
    ((*IMAGE, "--resync", "0"), {}, "argument --resync: '0' is not a number from 0.5 to 3600"),
    ((*IMAGE, "--lease-seconds", "nan"), {}, "argument --lease-seconds: 'nan' is not a number from 5 to 300"),
    (IMAGE, {"XPYD_POD_USER": "1000"}, "XPYD_POD_USER: '1000' is none of fixed, assigned"),
    ((*IMAGE, "--log-level", "loud"), {}, "argument --log-level: 'loud' is none of debug, info, warning, error"),
    ((*IMAGE, "--sidecar-pull-policy", "never"), {}, "'never' is none of Always, IfNotPresent, Never"),
    (IMAGE, {"XPYD_DRY_RUN": "yes"}, "XPYD_DRY_RUN: 'yes' is neither true nor false"),
    ((*IMAGE, "--nonsense"), {}, "unrecognized arguments: --nonsense"),
])
def test_a_wrong_flag_names_itself(flags: Sequence[str], environment: dict[str, str], named: str,
                                   capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(flags, environment)
    assert ended.value.code == 2
    assert named in capsys.readouterr().err


def operator(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "xpyd_operator.kube", *IMAGE, *flags], capture_output=True, text=True,
                          timeout=100, check=False)


def test_without_a_way_to_the_api_server_the_process_names_the_flag(tmp_path: Path) -> None:
    done = operator("--kubeconfig", str(tmp_path / "none"), "--http-port", str(free_port()), "--log-format", "text")
    assert done.returncode == 2
    assert f"--kubeconfig {tmp_path / 'none'}: " in done.stderr
    assert "Traceback" not in done.stderr


async def test_a_kubeconfig_without_the_context_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "clusters": [], "users": [], "contexts": []}))
    with pytest.raises(LoginError, match="other"):
        await Login(kubeconfig=str(path), context="other").configuration()


def test_an_operator_whose_api_server_is_away_waits_and_ends_in_order(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{free_port()}"}}],
        "users": [{"name": "c", "user": {"token": "s3cret-token"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}]}))
    process = subprocess.Popen([sys.executable, "-m", "xpyd_operator.kube", *IMAGE, "--kubeconfig", str(path),
                                "--http-port", str(free_port())], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(json.loads(line))
        if "cannot see the Lease" in line:
            break
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 0
    assert lines[-1]["level"] == "warning"
    assert "s3cret" not in json.dumps(lines) + rest


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What the root logger writes, as ``logs.configure`` sets it up."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        logs.configure("info", "json")
        handler = root.handlers[0]
        assert isinstance(handler, logging.StreamHandler)
        handler.setStream(stream)
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.getLogger("kopf").setLevel(logging.NOTSET)


def test_lines_of_a_service_name_it(log: io.StringIO) -> None:
    logger = logging.getLogger("xpyd_operator.test")
    with logs.log_subject("team", "qwen"):
        logger.info("one %d", 1, extra={"instance": "qwen-e0"})
    logger.info("two")
    one, two = (json.loads(line) for line in log.getvalue().splitlines())
    assert (one["namespace"], one["service"], one["instance"], one["message"]) == ("team", "qwen", "qwen-e0", "one 1")
    assert one["level"] == "info"
    assert "service" not in two


def test_lines_of_kopf_name_their_object_and_carry_nothing_else_of_it(log: io.StringIO) -> None:
    reference = {"apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "team", "uid": "u"}
    extra = {"k8s_ref": reference, "k8s_skip": True, "settings": kopf_settings()}
    logging.getLogger("kopf.objects").warning("odd", extra=extra)
    logging.getLogger("kopf.objects").info("each step")
    line, = log.getvalue().splitlines()
    assert json.loads(line) | {"time": ""} == {
        "time": "", "level": "warning", "logger": "kopf.objects", "message": "odd", "namespace": "team", "object": "Pod/p"}


async def test_the_watches_begin_for_a_user_whom_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenShift runs the operator as a number that stands in no list of users, where asking for a name is an error."""
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 1000660000")

    monkeypatch.setattr("getpass.getuser", nobody)
    monkeypatch.delenv("POD_ID", raising=False)
    login = Login(kubeconfig="/nowhere")
    watches = Kopf(login, Watch(WatchCache(), Metrics(), (), lambda *_: None), (), lambda: None)
    running = asyncio.create_task(watches.run())
    try:
        async with asyncio.timeout(10):
            while not watches.starts:
                assert not running.done()
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert watches.starts == 1


async def test_rounds_begin_after_the_lists() -> None:
    said: list[str] = []

    class Services:
        async def run(self) -> None:
            said.append("begun")

    class Watch:
        filled = asyncio.Event()

    served = asyncio.create_task(app._serve(Services(), Watch()))  # type: ignore[arg-type]
    await asyncio.sleep(0.02)
    assert said == []
    Watch.filled.set()
    await asyncio.wait_for(served, 5)
    assert said == ["begun"]
