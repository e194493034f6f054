"""What the backends of all services of one operator have together."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import msgspec

from xpyd_operator.kube.client.api import Api
from xpyd_operator.kube.client.cache import WatchCache
from xpyd_operator.kube.client.events import Events
from xpyd_operator.kube.client.metrics import Metrics
from xpyd_operator.kube.gangs.gangs import Gangs
from xpyd_operator.kube.gangs.topology import Topology
from xpyd_operator.kube.keys.master import Master
from xpyd_operator.kube.keys.turns import Turns
from xpyd_operator.kube.routes.gateways import Gateways
from xpyd_operator.kube.settings import OperatorSettings


class SharedParts(msgspec.Struct, frozen=True):
    """What all services of the operator share, made when it begins."""

    api: Api
    cache: WatchCache
    settings: OperatorSettings
    events: Events
    session: aiohttp.ClientSession
    clock: Callable[[], float]
    """Unix seconds."""
    master: Master
    turns: Turns
    gangs: Gangs
    topology: Topology
    gateways: Gateways
    metrics: Metrics = msgspec.field(default_factory=Metrics)
