"""Blocks from GPU to GPU over NCCL, in groups of two ranks.

    prefill, decode   the two sides of the link ─▶ thread   owns all communicators ─▶ driver   NCCL and CUDA

``kv.groups`` decides.
"""
