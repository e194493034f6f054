"""Workers of an engine whose leader is elsewhere: ``python -m xpyd_sidecar.engine.compat.follower ARGUMENT …``.

What ``vllm serve --headless`` does. The server's own module takes that option and starts a whole engine, and the command
is only there where the distribution is called vllm, as the one for CPUs is not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def run(argv: Sequence[str]) -> None:
    """Run the workers of these arguments until they end."""
    from vllm.entrypoints.cli.serve import run_headless  # noqa: PLC0415 (workers import this module, and need none of it)
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415 (likewise)
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415 (likewise)

    run_headless(make_arg_parser(FlexibleArgumentParser()).parse_args(list(argv)))


if __name__ == "__main__":
    run(sys.argv[1:])
