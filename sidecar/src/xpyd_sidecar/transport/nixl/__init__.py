"""Blocks that decode reads out of prefill's memory over NIXL: RDMA between hosts.

    prefill, decode   the two sides of the link ─▶ thread   owns all agents ─▶ session ─▶ driver   NIXL

``interface`` is what sessions know of it without NIXL; ``host`` looks whether there is RDMA here; ``kv.reads`` decides.
"""
