"""Blocks within a host, out of prefill's memory or through a file that both have mapped.

    process_vm   decode reads the copies in prefill's memory, by the kernel or by a mapping of it (``mapped``)
    arena        a file in a folder that both share, where decode may not read prefill's memory
    taker        decode's side of both: when something is read, and what is answered
"""
