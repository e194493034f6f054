"""What the backends of all services of one operator have together."""

from __future__ import annotations

from collections.abc import Callable

import aiohttp
import msgspec

from xpyd_operator.kube.api import Api
from xpyd_operator.kube.cache import WatchCache
from xpyd_operator.kube.events import Events
from xpyd_operator.kube.gangs import Gangs
from xpyd_operator.kube.gateways import Gateways
from xpyd_operator.kube.master import Master
from xpyd_operator.kube.metrics import Metrics
from xpyd_operator.kube.settings import OperatorSettings
from xpyd_operator.kube.topology import Topology
from xpyd_operator.kube.turns import Turns


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
