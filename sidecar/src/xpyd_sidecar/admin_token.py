"""``python -m xpyd_sidecar.admin_token KEY_FILE``: print the bearer token of the routers' admin paths (/fleet, /dashboard).

It is made from the service's key, so whoever may read the key has it, and it is written nowhere.

Exit code: 0 printed; 2 the file cannot be read or holds no key (one line on stderr says which).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from xpyd_sidecar.contract import keys


def main(argv: Sequence[str]) -> int:
    """The command; returns its exit code."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m xpyd_sidecar.admin_token KEY_FILE\n")
        return 2
    try:
        key = keys.read(Path(argv[0]))
    except OSError as error:
        sys.stderr.write(f"xpyd_sidecar.admin_token: {argv[0]} cannot be read: {error.strerror}\n")
        return 2
    except ValueError as error:
        sys.stderr.write(f"xpyd_sidecar.admin_token: {error}\n")
        return 2
    sys.stdout.write(f"{keys.admin_token(key)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
