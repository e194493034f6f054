"""The connector beside a worker: the cache of one rank, copies out of it and into it, and the links over which they go.

Belongs here: what touches tensors or registers memory. Does not belong here: which requests go where (``scheduler``).
"""
