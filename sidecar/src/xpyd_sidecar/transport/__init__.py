"""How bytes travel between two ranks: links, behind one interface (``link``).

- ``tcp``: the connection of every session, and the link that puts blocks into its frames. Everywhere.
- ``shm``: within a host. Decode maps the memory of prefill's copies.
- ``nccl``: between GPUs.
- ``nixl``: RDMA between hosts.

    nccl, nixl, shm ─▶ tickets ─▶ tcp ─▶ offers ─▶ link, gates ─▶ moves ─▶ _moves (C), moves_plain

``moves`` are the loops that cost: from a socket or shared memory to where blocks belong, summed up on the way.
An I/O thread writes into a cache inside of ``gates`` alone. Belongs here: sockets, mappings, libraries that move bytes.
Does not belong here: what is asked and owed (``session``), whose memory it is (``memory``).
"""
