"""The link ``nixl``: decode reads prefill's store by RDMA between hosts.

    serve     prefill's side of the link ─┐
    fetch     decode's side ──────────────┴▶ thread   owns both agents ─▶ reading ─▶ agent ─▶ driver   NIXL

NIXL itself is loaded by ``driver`` alone, when it is wanted; ``kv.reads`` decides what is read when, and what may be
believed.
"""
