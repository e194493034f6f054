"""Run as a script: write down who this process is, then become the command.

    python -I -S shim.py RECORD -- COMMAND ARGUMENT …

The record is on disk before the command runs, whether or not whoever started this process still lives; process id and
start time stay the same across exec. Imports nothing but the standard library's core, since it runs before every process.
"""

import os
import sys
import time


def main() -> None:
    """Write the record atomically and exec."""
    record, command = sys.argv[1], sys.argv[3:]
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        text = file.read()
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    start = int(text[text.rindex(")") + 2 :].split()[19])
    body = f'{{"pid": {os.getpid()}, "start": {start}, "boot": "{boot}", "unix": {time.time():.3f}}}'
    temporary = f"{record}.{os.getpid()}"
    with open(temporary, "w", encoding="ascii") as file:
        file.write(body)
    os.replace(temporary, record)
    try:
        os.execvp(command[0], command)  # noqa: S606 (the command is ours, and there is no shell)
    except OSError as error:
        sys.stderr.write(f"xpyd: cannot run {command[0]}: {error.strerror}\n")
        raise SystemExit(127) from None


if __name__ == "__main__":
    main()
