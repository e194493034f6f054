"""Blocks that decode reads out of prefill's memory over NIXL: RDMA between hosts.

    prefill, decode   the two sides of the link ─▶ thread   owns all agents ─▶ session ─▶ driver   NIXL

NIXL itself is loaded by ``driver`` alone, when it is wanted; ``kv.reads`` decides.
"""
