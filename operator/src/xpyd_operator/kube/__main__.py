"""``python -m xpyd_operator.kube``: the operator of a cluster.

Each flag has an environment variable, ``XPYD_`` and its name (``--sidecar-image``: ``XPYD_SIDECAR_IMAGE``); the flag wins.

Exit code: 0 ended by a signal; 1 it could not go on (the log says why); 2 a flag is wrong (one line on stderr names it).
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import disable_created_metrics

from xpyd_operator import __version__, versions
from xpyd_operator.errors import XpydError
from xpyd_operator.kube import logs
from xpyd_operator.kube.app import Operator
from xpyd_operator.kube.client.login import Login, LoginError
from xpyd_operator.kube.health import PortTaken
from xpyd_operator.kube.settings import OperatorSettings
from xpyd_operator.render import gang

logger = logging.getLogger("xpyd_operator.kube")
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_IMAGE = re.compile(r"[a-zA-Z0-9][\w.:/@-]*")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    settings, login, elect = parse(sys.argv[1:] if argv is None else argv, os.environ)
    logs.configure(settings.log_level, settings.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]  # twice the series, for what a restart shows
    try:
        versions.check()
        return asyncio.run(Operator(settings, login, elect=elect).run())
    except (LoginError, PortTaken) as error:
        logger.error("%s", error)  # noqa: TRY400 (the message says all)
        return 2
    except XpydError as error:
        logger.error("%s", error)  # noqa: TRY400
        return 1
    except Exception:
        logger.exception("the operator failed")
        return 1


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[OperatorSettings, Login, bool]:
    """Flags over environment over defaults: the settings, the way to the API server, and whether to elect a leader.

    Raises:
        SystemExit: a flag or its variable is wrong; stderr names it.
    """
    parser = argparse.ArgumentParser(prog="xpyd_operator.kube", description="The operator of xpyd for a cluster.",
                                     epilog="Each flag may be given as XPYD_<FLAG> in the environment.")
    parser.add_argument("--version", action="version", version=f"xpyd {__version__}")

    def flag(name: str, kind: Callable[[str], Any], default: Any, text: str, **more: Any) -> None:
        variable = f"XPYD_{name.upper().replace('-', '_')}"
        given = environment.get(variable)
        if given is not None:
            try:
                default = kind(given)
            except argparse.ArgumentTypeError as error:
                parser.error(f"{variable}: {error}")
        parser.add_argument(f"--{name}", type=kind, default=default, help=text, **more)

    def switch(name: str, text: str) -> None:
        variable = f"XPYD_{name.upper().replace('-', '_')}"
        given = environment.get(variable, "false")
        if given not in ("true", "false"):
            parser.error(f"{variable}: {given!r} is neither true nor false")
        parser.add_argument(f"--{name}", action="store_true", default=given == "true", help=text)

    here = environment.get("POD_NAMESPACE") or _own_namespace() or "xpyd-system"
    flag("sidecar-image", _matching(_IMAGE, "an image"), None, "image of router and agent (required)")
    flag("sidecar-pull-policy", _one_of("Always", "IfNotPresent", "Never"), "IfNotPresent", "when the kubelet pulls it")
    flag("cluster-domain", _matching(_DOMAIN, "a domain"), "cluster.local", "domain of the cluster's Services")
    flag("operator-namespace", _namespace, here, "where the operator runs (default: as the pod says)")
    flag("pod-user", _one_of("fixed", "assigned"), "fixed", "who pods run as: 65532, or whom the cluster assigns")
    flag("lease-name", _matching(_DOMAIN, "a name"), "xpyd-operator", "Lease by which replicas elect who works")
    flag("master-secret", _matching(_DOMAIN, "a name"), "xpyd-master", "Secret of its namespace that keys are derived from")
    flag("lease-namespace", _namespace, None, "its namespace (default: the operator's)")
    flag("lease-seconds", _number(5, 300), 10.0, "a Lease that was not renewed for so long may be taken over")
    flag("resync", _number(0.5, 3600), 5.0, "seconds after which a service that nothing wakes is looked at")
    flag("http-port", _port, 8080, "port of /metrics, /healthz and /readyz")
    flag("log-format", _one_of("json", "text"), "json", "one JSON object or one line of text per event")
    flag("log-level", _one_of("debug", "info", "warning", "error"), "info", "least level that is logged")
    flag("kubeconfig", str, "", "outside of a cluster: the file to log in with")
    flag("context", str, "", "context of that file (default: its current one)")
    flag("gang", _one_of("auto", "none", *gang.VERSIONS), "auto", "who places the pods of an instance of several together")
    switch("no-leader-election", "work at once; never with more than one replica")
    switch("dry-run", "plan and log, write nothing")
    several = environment.get("XPYD_NAMESPACE", "")
    parser.add_argument("--namespace", type=_namespace, action="append", metavar="NAMESPACE",
                        help="look after this namespace only; may be repeated (XPYD_NAMESPACE: separated by commas)")
    args = parser.parse_args(argv)
    if args.sidecar_image is None:
        parser.error("--sidecar-image (or XPYD_SIDECAR_IMAGE) is required")
    if args.namespace is None:
        try:
            args.namespace = [_namespace(each.strip()) for each in several.split(",") if each.strip()]
        except argparse.ArgumentTypeError as error:
            parser.error(f"XPYD_NAMESPACE: {error}")
    host = environment.get("POD_NAME") or socket.gethostname()
    return (
        OperatorSettings(
            sidecar_image=args.sidecar_image, sidecar_pull_policy=args.sidecar_pull_policy,
            cluster_domain=args.cluster_domain, operator_namespace=args.operator_namespace, pod_user=args.pod_user,
            gang=args.gang,
            namespaces=tuple(dict.fromkeys(args.namespace)), resync_s=args.resync, dry_run=args.dry_run,
            http_port=args.http_port, lease_name=args.lease_name, master_secret=args.master_secret,
            lease_namespace=args.lease_namespace or args.operator_namespace,
            identity=f"{host}_{secrets.token_hex(4)}",  # a restarted container is another candidate
            lease_s=args.lease_seconds, log_level=args.log_level, log_format=args.log_format,
        ),
        Login(kubeconfig=args.kubeconfig, context=args.context),
        not args.no_leader_election,
    )


def _own_namespace() -> str:
    """The namespace of this pod; empty outside of a cluster."""
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return ""


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not pattern.fullmatch(text):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return text

    return read


_namespace = _matching(_LABEL, "a namespace")


def _one_of(*choices: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return read


def _number(least: float, most: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")
        return number

    return read


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
