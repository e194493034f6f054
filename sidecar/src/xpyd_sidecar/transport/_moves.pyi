from xpyd_sidecar.transport.moves_plain import REVISION as REVISION
from xpyd_sidecar.transport.moves_plain import Scatter as Scatter
from xpyd_sidecar.transport.moves_plain import sums as sums
