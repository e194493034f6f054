"""``python -m patient_operator``: the operator of this tree, which waits longer for what routers answer.

Scripted routers answer from the process of the tests, which a full machine may keep waiting for seconds. What an operator
says of a router that does not answer in time is tested without a cluster (``tests/sockets/test_kube_fleet.py``).
"""

from __future__ import annotations

import sys
from typing import Final

import msgspec

from xpyd_operator.kube import __main__ as command

ANSWER_S: Final = 20.0


def main() -> int:
    """As the command."""
    parse = command.parse

    def patient(*given: object) -> object:
        settings, *more = parse(*given)  # type: ignore[arg-type]
        return msgspec.structs.replace(settings, fleet_timeout_s=ANSWER_S), *more

    command.parse = patient  # type: ignore[assignment]
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
