"""What decode fetches from GPU to GPU over NCCL, in groups of two ranks.

    serve, fetch   the two sides of the link ─▶ thread   owns all communicators ─▶ driver   NCCL and CUDA

``kv.groups`` decides.
"""
