from xpyd_sidecar.engine.links.plain import REVISION as REVISION
from xpyd_sidecar.engine.links.plain import Scatter as Scatter
from xpyd_sidecar.engine.links.plain import come_home as come_home
from xpyd_sidecar.engine.links.plain import receive as receive
from xpyd_sidecar.engine.links.plain import send as send
from xpyd_sidecar.engine.links.plain import sums as sums
