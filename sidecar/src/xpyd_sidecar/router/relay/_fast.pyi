from xpyd_sidecar.router.relay.plain import REVISION as REVISION
from xpyd_sidecar.router.relay.plain import Leg as Leg
from xpyd_sidecar.router.relay.plain import Outlet as Outlet
from xpyd_sidecar.router.relay.plain import Scanner as Scanner
