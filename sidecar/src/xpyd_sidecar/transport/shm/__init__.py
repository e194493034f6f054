"""Blocks within a host: decode maps the memory in which prefill's copies lie, and copies them out itself.

    serve     prefill's side: the memory, its descriptor sent to decode        fetch   decode's side: maps it, copies out
    mailbox   the socket over which a descriptor comes from one process to another
"""
