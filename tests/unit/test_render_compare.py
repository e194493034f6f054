"""Whether an object in the cluster is as it was applied."""

from __future__ import annotations

from typing import Any

import pytest

from xpyd_operator.render.compare import differs, dropped_path


@pytest.mark.parametrize(
    ("wanted", "live"),
    [
        ({"a": 1}, {"a": 1, "b": 2, "status": {}}),
        ({"a": [], "c": "", "d": {}, "e": False, "f": None}, {}),
        ({}, {"a": [], "b": {}}),
        ({"port": 80}, {"port": "80"}),
        ({"limits": {"cpu": "1000m", "memory": "1Gi"}}, {"limits": {"cpu": "1", "memory": "1024Mi"}}),
        ({"limits": {"cpu": 1}}, {"limits": {"cpu": "1"}}),
        ({"emptyDir": {"sizeLimit": "1Gi"}}, {"emptyDir": {"sizeLimit": "1024Mi"}}),
        ({"env": [{"name": "A", "value": ""}]}, {"env": [{"name": "B", "value": "x"}, {"name": "A"}]}),
        ({"volumes": [{"name": "a", "x": "1"}]}, {"volumes": [{"name": "a", "y": "2", "x": "1"}, {"name": "b"}]}),
        ({"volumeMounts": [{"name": "v", "mountPath": "/a"}]}, {"volumeMounts": [{"name": "v", "mountPath": "/a"}]}),
        ({"command": ["a", "b"]}, {"command": ["a", "b"]}),
        ({"command": ("a", "b")}, {"command": ["a", "b"]}),
        ({"selector": {"a": "1"}}, {"selector": {"a": "1"}}),
        ({"podSelector": {"matchLabels": {}}}, {"podSelector": {"matchExpressions": []}}),
        ({"ingress": [{"from": [{"podSelector": {}}]}]}, {"ingress": [{"from": [{"podSelector": {}}]}]}),
        ({"limits": {"x": "1u"}}, {"limits": {"x": "1u"}}),
        ({"a": 0}, {"a": 0}),
    ],
    ids=str,
)
def test_as_wanted(wanted: dict[str, Any], live: dict[str, Any]) -> None:
    assert differs(wanted, live) == ""


@pytest.mark.parametrize(
    ("wanted", "live", "path"),
    [
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "a.b"),
        ({"a": {"b": 1}}, {}, "a"),
        ({"a": {"b": 1}}, {"a": "text"}, "a"),
        ({"a": 0}, {}, "a"),
        ({"a": False}, {"a": True}, "a"),
        ({"a": True}, {"a": 1}, "a"),
        ({"a": "true"}, {"a": True}, "a"),
        ({"port": 80}, {"port": "http"}, "port"),
        ({"label": "1e3"}, {"label": "1000"}, "label"),
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "2"}}, "limits.cpu"),
        ({"limits": {"x": "1u"}}, {"limits": {"x": "1n"}}, "limits.x"),
        ({"limits": {"x": 1}}, {"limits": {"x": True}}, "limits.x"),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "2"}]}, "env[A].value"),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "B", "value": "1"}]}, "env[A]"),
        ({"env": [{"name": "A", "value": "1"}]}, {}, "env"),
        ({"command": ["a"]}, {"command": ["a", "b"]}, "command"),
        ({"command": ["a", "b"]}, {"command": ["b", "a"]}, "command[0]"),
        ({"selector": {"a": "1"}}, {"selector": {"a": "1", "b": "2"}}, "selector.b"),
        ({"spec": {"podSelector": {"matchLabels": {"a": "1"}}}},
         {"spec": {"podSelector": {"matchLabels": {"a": "1"}, "matchExpressions": [{"key": "b"}]}}},
         "spec.podSelector.matchExpressions"),
        ({"ingress": [{"ports": [{"port": 1}]}]}, {"ingress": [{"ports": [{"port": 1}, {"port": 2}]}]}, "ingress[0].ports"),
        ({"ingress": [{"ports": [{"port": 1}]}]}, {"ingress": [{"ports": [{"port": 1}]}, {}]}, "ingress"),
        ({"a": 1}, None, "document"),
    ],
    ids=str,
)
def test_the_path_of_what_differs(wanted: Any, live: Any, path: str) -> None:
    assert differs(wanted, live) == path


@pytest.mark.parametrize(("wanted", "live", "path"), [
    ({"a": 1}, {"a": 2}, ""),
    ({"a": {"b": 1}}, {"a": {"c": 1}}, "a.b"),
    ({"a": {}, "b": None, "c": False, "d": [], "e": 0, "f": {"g": [{}, 0]}}, {}, ""),
    ({"a": {"b": 0, "c": "0"}}, {"d": 1}, "a"),
    ({"l": [{"name": "x", "v": 1}, {"name": "y", "v": 1}]}, {"l": [{"name": "y", "v": 2}, {"name": "z"}]}, "l[x]"),
    ({"m": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]},
     {"m": [{"name": "v", "mountPath": "/b"}]}, "m[/a]"),
    ({"m": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]},
     {"m": [{"name": "v", "mountPath": "/b"}, {"name": "v", "mountPath": "/a"}, {"name": "added", "mountPath": "/c"}]}, ""),
    ({"l": [1, 2]}, {"l": [3, 4, 5]}, ""), ({"l": [1, 2]}, {"l": [3]}, "l"),
    ({"a": {"b": 1}}, {"a": "text"}, ""), ({"a": "1000m"}, {"a": 1}, ""), ({"a": 1}, None, "document"), ({}, None, ""),
], ids=str)
def test_the_path_of_what_is_not_there_at_all(wanted: Any, live: Any, path: str) -> None:
    assert dropped_path(wanted, live) == path
