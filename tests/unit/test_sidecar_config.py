"""Configuration of the sidecar: what is wrong is named with its field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xpyd_sidecar import config
from xpyd_sidecar.contract.ids import Role
from xpyd_sidecar.errors import ConfigError


def document(**changes: Any) -> dict[str, Any]:
    """A right one; a change ``a__b=1`` sets ``a.b``, None removes."""
    made: dict[str, Any] = {
        "service": "test", "instance": "test-e0", "key_file": "/k", "run_dir": "/r",
        "agent": {"role": "decode", "engine": "127.0.0.1:8000", "advertise_host": "10.0.0.7", "advertise_port": 8000,
                  "routers": ["r:30001"]},
        "router": {},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = made
        for parent in parents:
            place = place[parent]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return made


def test_a_right_document() -> None:
    decoded = config.decode(json.dumps(document()))
    assert decoded.agent is not None
    assert decoded.router is not None
    assert (decoded.agent.role, decoded.router.members_port) == (Role.DECODE, 30001)


@pytest.mark.parametrize(("changes", "words"), [
    ({"agent__engin": "x"}, "unknown field `engin` - at `$.agent`"),
    ({"port": 1}, "unknown field `port`"),
    ({"router__port": "80"}, "`$.router.port`"),
    ({"router__port": 0}, "a port from 1 to 65535, not 0 - at `$.router.port`"),
    ({"router__members_port": 70000}, "not 70000 - at `$.router.members_port`"),
    ({"router__port": 30001}, "must differ from port, both are 30001 - at `$.router.members_port`"),
    ({"router__admin_port": 30001}, "must differ from port and members_port, not 30001 - at `$.router.admin_port`"),
    ({"router__trusted_proxies": ["10.0.0.0/40"]}, "'10.0.0.0/40' is no network, such as 10.0.0.0/8"),
    ({"router__heartbeat_s": -1}, "above 0, not -1.0 - at `$.router.heartbeat_s`"),
    ({"router__listen_on_s": -1}, "not be negative, not -1.0 - at `$.router.listen_on_s`"),
    ({"router__body_budget_bytes": 0}, "above 0, not 0 - at `$.router.body_budget_bytes`"),
    ({"router__queue_size": -1}, "not be negative, not -1 - at `$.router.queue_size`"),
    ({"router__queue_timeout_s": 0}, "above 0, not 0.0 - at `$.router.queue_timeout_s`"),
    ({"router__max_per_instance": -1}, "not be negative, not -1 - at `$.router.max_per_instance`"),
    ({"router__skip_prefill_below": -1}, "not be negative, not -1 - at `$.router.skip_prefill_below`"),
    ({"router__skip_prefill_rest": -1}, "must not be negative, not -1 - at `$.router.skip_prefill_rest`"),
    ({"router__retry_budget": -0.1}, "a share from 0 to 1, not -0.1 - at `$.router.retry_budget`"),
    ({"router__hosts": ["a", "b:80"]}, "'b:80' is not the name of a host, without a port - at `$.router.hosts[1]`"),
    ({"router__cors_origins": ["https://a.ex/"]}, "'https://a.ex/' is not an origin; write https://host, with a port"),
    ({"router__tls_cert_file": "/c"}, "is required beside tls_cert_file - at `$.router.tls_key_file`"),
    ({"router__tls_key_file": "/k"}, "is required beside tls_key_file - at `$.router.tls_cert_file`"),
    ({"router__tls_key_file": "", "router__tls_cert_file": "/c"}, "a path is required - at `$.router.tls_key_file`"),
    ({"router__otlp_endpoint": "collector:4318"}, "write http://host:port - at `$.router.otlp_endpoint`"),
    ({"router__first_token": "both"}, "`$.router.first_token`"),
    ({"agent__role": "both"}, "`$.agent.role`"),
    ({"agent__engine": "8000"}, "'8000' is not host:port - at `$.agent.engine`"),
    ({"agent__engine": "::1:8000"}, "write an IPv6 host in brackets, [host]:port - at `$.agent.engine`"),
    ({"agent__advertise_host": None}, "missing required field `advertise_host`"),
    ({"agent__advertise_host": ""}, "'' is not a host; write a name or an address, without brackets and port"),
    ({"agent__advertise_host": "[fd00::5]"}, "an address, without brackets and port - at `$.agent.advertise_host`"),
    ({"agent__advertise_host": "10.0.0.7:80"}, "'10.0.0.7:80' is not a host; write a name"),
    ({"agent__advertise_port": 0}, "a port from 1 to 65535, not 0 - at `$.agent.advertise_port`"),
    ({"agent__routers": []}, "at least one router address is required - at `$.agent.routers`"),
    ({"agent__routers": ["a:1", "b"]}, "'b' is not host:port - at `$.agent.routers[1]`"),
    ({"agent__group": {"index": 0, "size": 1, "layout": "x"}}, "from 2 to 16, not 1 - at `$.agent.group.size`"),
    ({"agent__group": {"index": 2, "size": 2, "layout": "x"}}, "from 0 to 1, not 2 - at `$.agent.group.index`"),
    ({"agent__group": {"index": 0, "size": 2, "layout": "x"}}, "the leader must listen, for the other members"),
    ({"agent__group": {"index": 1, "size": 2, "layout": "x", "leader": "a"}},
     "'a' is not host:port - at `$.agent.group.leader`"),
    ({"agent__group": {"index": 1, "size": 2, "layout": "x", "leader": "a:1", "over_s": 0}},
     "must be above 0, not 0 - at `$.agent.group.over_s`"),
    ({"agent__data_parallel": 0}, "at least 1, not 0 - at `$.agent.data_parallel`"),
    ({"agent__epoch": -1}, "not be negative, not -1 - at `$.agent.epoch`"),
    ({"agent__drain_timeout_s": 0}, "above 0, not 0.0 - at `$.agent.drain_timeout_s`"),
    ({"service": "Test_1"}, "`$.service`"),
    ({"service": "a" * 46}, "`$.service`"),
    ({"instance": ""}, "must not be empty - at `$.instance`"),
    ({"key_file": ""}, "a path is required - at `$.key_file`"),
    ({"key_file": None}, "missing required field `key_file`"),
    ({"agent": None, "router": None}, "give `agent`, `router` or both"),
])
def test_a_wrong_document_is_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.decode(json.dumps(document(**changes)))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("host", "address"), [("10.0.0.7", "10.0.0.7:8000"), ("fd00::5", "[fd00::5]:8000"),
                                               ("engine-1.lan", "engine-1.lan:8000")])
def test_an_engine_is_advertised_by_host_and_port_whatever_the_family(host: str, address: str) -> None:
    agent = config.decode(json.dumps(document(agent__advertise_host=host))).agent
    assert agent is not None
    assert agent.advertised_address == address


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00", b"\xff\xfe"])
def test_what_is_no_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(ConfigError):
        config.decode(text)
