"""How bytes travel between two ranks: links, behind one interface (``links``).

- ``tcp``: stripes beside the session's control connection. Everywhere that it was compiled.
- ``shm``: within a host. Decode maps the memory of prefill's copies.
- ``nccl``: between GPUs.
- ``nixl``: RDMA between hosts.

    nccl, nixl, shm ─▶ tcp, tickets ─▶ links ─▶ landing ─▶ gates ─▶ _stripes (C)
                                                └─▶ moves ─▶ _moves (C), moves_plain

``moves`` are the loops that cost: from shared memory to where blocks belong, summed up on the way; those over sockets are
``_stripes``. Whoever writes into a cache does so inside of a gate alone (``gates``). Belongs here: sockets, mappings,
libraries that move bytes. Does not belong here: what is asked and owed (``session``), whose memory it is (``memory``).
"""
