"""Merging the user's pod template into a pod that xpyd made: that of an engine, or of a router in a pod of its own.

A template that changes what xpyd needs is refused, with the path of the field: names, xpyd's labels, what the main
container runs, those of its variables and ports that xpyd sets, and the volumes of ``PodNeeds.volumes`` with their mounts.
The volumes ``shm``, ``tmp``, ``home`` and ``cache`` may become others, e.g. a larger disk; probes, resources and security
contexts may change too. Of xpyd's own init containers only resources and security context may. User and group of an
engine's main container and of xpyd's own containers are those of the pod, since they share files.

The rules by which two templates are merged are in ``api.templates``.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from xpyd_operator.api import owned
from xpyd_operator.api.base import GROUP
from xpyd_operator.api.templates import LISTS, KeyedList, merge
from xpyd_operator.errors import UnsupportedField
from xpyd_operator.render import labels
from xpyd_operator.render import paths as at

_NEEDED_LABELS: Final = frozenset({labels.NAME, labels.INSTANCE, labels.COMPONENT, labels.MANAGED_BY})


class PodNeeds(NamedTuple):
    """What one kind of pod that xpyd makes needs, so that no template may change it."""

    what: str
    """In words."""
    main: str
    """The container that everything is there for."""
    own: frozenset[str]
    """Those of xpyd among the init containers."""
    pod: Mapping[str, str]
    """Fields of the pod that are taken, and what to write instead."""
    container: Mapping[str, str]
    """The same of the main container."""
    volumes: frozenset[str]
    mounts: tuple[str, ...]
    ports: frozenset[str | int]
    """Names and numbers of the main container's."""
    one_user: bool
    """Its containers share files of one user."""


ENGINE_POD: Final = PodNeeds(
    what="engine",
    main=labels.MAIN,
    own=frozenset({labels.SIDECAR, labels.INSTALL}),
    pod={
        "restartPolicy": "an engine that ends is started again; leave it out",
        "enableServiceLinks": "a Service named vllm would then set VLLM_PORT, on which vLLM ends; leave it out",
        "terminationGracePeriodSeconds": "write spec.drain.timeout",
        "hostNetwork": "the ports of two engines on one node would clash; leave it out",
        "activeDeadlineSeconds": "an engine that serves would be ended; leave it out",
    },
    container={
        "image": "write spec.engine.image",
        "command": "xpyd starts the engine; write spec.engine.args or the role's args",
        "args": "write spec.engine.args or the role's args",
        "lifecycle": "xpyd drains the engine before it stops; leave it out",
    },
    volumes=frozenset({"xpyd", "run", "key", "clients", "model", "assignment"}),
    mounts=(at.PACKAGE, at.RUN, at.KEY_DIR, at.CLIENTS_DIR, at.CLAIM),
    ports=frozenset({"engine", at.ENGINE_PORT}),
    one_user=True,
)
_IMAGE: Final = "the operator names the image of routers (XPYD_SIDECAR_IMAGE, in the chart sidecar.image); leave it out"
_RUNS: Final = "xpyd starts the router; write fields of spec.router"
ROUTER_POD: Final = PodNeeds(
    what="router",
    main=labels.ROUTERS,
    own=frozenset(),
    pod={
        "restartPolicy": "a router that ends is started again; leave it out",
        "enableServiceLinks": "a router asks no Service by its variables; leave it out",
        "terminationGracePeriodSeconds": "write spec.drain.timeout",
        "hostNetwork": "the ports of two routers on one node would clash; leave it out",
        "activeDeadlineSeconds": "a router that serves would be ended; leave it out",
    },
    container={
        "image": _IMAGE,
        "imagePullPolicy": _IMAGE,
        "command": _RUNS,
        "args": _RUNS,
        "lifecycle": "a router drains at its end by itself; leave it out",
    },
    volumes=frozenset({"run", "key", "clients", "tls"}),
    mounts=(at.RUN, at.KEY_DIR, at.CLIENTS_DIR, at.TLS_DIR),
    ports=frozenset({labels.CLIENTS, "members", labels.ADMIN}),
    one_user=False,
)
_OWN: Final = frozenset({"name", "resources", "securityContext"})

_USER: Final = ("runAsUser", "runAsGroup")

_PARTS: Final[tuple[tuple[str, Mapping[str, KeyedList]], ...]] = (("metadata", {}), ("spec", LISTS))

Finding = tuple[str, str]
"""Path, and what is wrong and what would be right."""


def overlay(pod: dict[str, Any], template: Mapping[str, Any], path: str = "template") -> dict[str, Any]:
    """Return the pod with the template merged over it, whose values win; neither argument is changed.

    Only the form is checked, and not ``faults``: a document that was accepted once stays in use.

    Raises:
        UnsupportedField: a part of the template lacks the form of a pod template, so it cannot be merged.
    """
    for where, reason in forms(template, path):
        raise UnsupportedField(where, reason)
    made = dict(pod)
    for key, lists in _PARTS:
        if template.get(key) is not None:
            made[key] = merge(pod[key], template[key], lists)
    return made


def faults(template: Mapping[str, Any], path: str = "template", kind: PodNeeds = ENGINE_POD) -> Iterator[Finding]:
    """Yield what in a template would change something that the pod needs, or lacks the form of a pod template."""
    for key in template:
        if key not in ("metadata", "spec"):
            yield f"{path}.{key}", "a pod template has metadata and spec"
    for key, check in (("metadata", _metadata), ("spec", partial(_pod, kind))):
        part = template.get(key)
        if isinstance(part, dict):
            yield from check(part, f"{path}.{key}")
    yield from forms(template, path)


def common_faults(template: Mapping[str, Any], path: str) -> Iterator[Finding]:
    """Yield the ``faults`` of a template that engines and routers share (``spec.template``), each path once."""
    said = set()
    for kind in (ENGINE_POD, ROUTER_POD):
        for where, reason in faults(template, path, kind):
            if where not in said:
                yield where, reason
            said.add(where)


def forms(template: Mapping[str, Any], path: str = "template") -> Iterator[Finding]:
    """Yield what in a template cannot be merged, since it lacks the form of a pod template."""
    for key, lists in _PARTS:
        part = template.get(key)
        if isinstance(part, dict):
            yield from _form(part, f"{path}.{key}", lists)
        elif part is not None:
            yield f"{path}.{key}", "must be an object (key: value)"


def _metadata(given: dict[str, Any], path: str) -> Iterator[Finding]:
    for key, part in given.items():
        here = f"{path}.{key}"
        if key not in ("labels", "annotations"):
            yield here, "only labels and annotations can be given"
        elif not isinstance(part, dict):
            yield here, "must be an object (key: value); xpyd's own stay"
        else:
            for name in part:
                if name.partition("/")[0] == GROUP or name in _NEEDED_LABELS:
                    yield f'{here}["{name}"]', "is set by xpyd; take another name"


def _pod(kind: PodNeeds, spec: dict[str, Any], path: str) -> Iterator[Finding]:
    yield from _taken(spec, kind.pod, path)
    for here, container in _items(spec, "containers", path):
        if container["name"] == kind.main:
            yield from _main(kind, container, here)
        elif container["name"] in kind.own:
            yield f"{here}.name", f"{container['name']} is among initContainers; take another name"
    for here, container in _items(spec, "initContainers", path):
        if container["name"] == kind.main:
            yield f"{here}.name", f"{kind.main} is among containers; take another name"
        elif container["name"] in kind.own:
            for key in container:
                if key not in _OWN:
                    yield f"{here}.{key}", "of this container only resources and securityContext can be given"
            yield from _one_user(container, here)
    for here, volume in _items(spec, "volumes", path):
        if volume["name"] in kind.volumes:
            yield f"{here}.name", f"{volume['name']} is a volume of xpyd; take another name"


def _main(kind: PodNeeds, container: dict[str, Any], path: str) -> Iterator[Finding]:
    yield from _taken(container, kind.container, path)
    if kind.one_user:
        yield from _one_user(container, path)
    for here, variable in _items(container, "env", path):
        if instead := owned.env(variable["name"]):
            yield f"{here}.name", f"{variable['name']} is set by xpyd; {instead}"
    for here, mount in _items(container, "volumeMounts", path):
        where = posixpath.normpath(mount["mountPath"])
        for needed in kind.mounts:
            if where == needed or where.startswith(f"{needed}/"):
                yield f"{here}.mountPath", f"{needed} is used by xpyd; take another path"
    for here, port in _items(container, "ports", path):
        if port["name"] in kind.ports or port.get("containerPort") in kind.ports:
            which = port["name"] if port["name"] in kind.ports else port["containerPort"]
            yield here, f"{which} is the {kind.what}'s own port; take another one"


def _one_user(container: dict[str, Any], path: str) -> Iterator[Finding]:
    security = container.get("securityContext")
    for key in _USER:
        if isinstance(security, dict) and key in security:
            reason = "engine and agent share files of one user; write it in securityContext of the pod"
            yield f"{path}.securityContext.{key}", reason


def _taken(given: dict[str, Any], fields: Mapping[str, str], path: str) -> Iterator[Finding]:
    for key, instead in fields.items():
        if key in given:
            yield f"{path}.{key}", instead


def _items(given: dict[str, Any], name: str, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and item of a keyed list; items without a key are left out, since ``_list_form`` reports them."""
    items, key = given.get(name), "mountPath" if name == "volumeMounts" else "name"
    for index, item in enumerate(items if isinstance(items, list | tuple) else ()):
        if isinstance(item, dict) and isinstance(item.get(key), str):
            yield f"{path}.{name}[{index}]", item


def _form(given: dict[str, Any], path: str, lists: Mapping[str, KeyedList]) -> Iterator[Finding]:
    """Yield what in ``given`` cannot be merged."""
    for key, part in given.items():
        here = f"{path}.{key}"
        if key.startswith("$"):
            yield here, "directives of a strategic merge are not known here"
        elif key in lists:
            yield from _list_form(part, here, lists[key])
        elif isinstance(part, dict):
            yield from _form(part, here, {})


def _list_form(items: Any, path: str, how: KeyedList) -> Iterator[Finding]:
    if not isinstance(items, list | tuple):
        yield path, "must be a list; what xpyd needs in it cannot be taken away"
        return
    for index, item in enumerate(items):
        if isinstance(item, dict) and isinstance(item.get(how.key), str):
            yield from _form(item, f"{path}[{index}]", how.inside)
        else:
            yield f"{path}[{index}]", f"must be an object with {how.key}"
