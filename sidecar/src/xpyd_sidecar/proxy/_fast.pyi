from xpyd_sidecar.proxy.plain import REVISION as REVISION
from xpyd_sidecar.proxy.plain import Leg as Leg
from xpyd_sidecar.proxy.plain import Outlet as Outlet
from xpyd_sidecar.proxy.plain import Scanner as Scanner
