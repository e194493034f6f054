"""Blocks within a host: decode maps the memory in which prefill's copies lie, and copies them out itself.

    prefill   the memory, its descriptor sent to decode, offers        decode   maps it, reads what is offered
    mailbox   the socket over which a descriptor comes from one process to another
"""
