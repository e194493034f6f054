from xpyd_sidecar.router.relay.plain import REVISION as REVISION
from xpyd_sidecar.router.relay.plain import Outlet as Outlet
from xpyd_sidecar.router.relay.plain import Scanner as Scanner
from xpyd_sidecar.router.relay.plain import UpstreamReceiver as UpstreamReceiver
