from xpyd_sidecar.transport.moves_plain import REVISION as REVISION
from xpyd_sidecar.transport.moves_plain import Scatter as Scatter
from xpyd_sidecar.transport.moves_plain import come_home as come_home
from xpyd_sidecar.transport.moves_plain import receive as receive
from xpyd_sidecar.transport.moves_plain import send as send
from xpyd_sidecar.transport.moves_plain import sums as sums
