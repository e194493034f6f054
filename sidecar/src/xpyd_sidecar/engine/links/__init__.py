"""Ways to move blocks between two engines, behind one interface (``base``).

- ``tcp``: frames of the session itself, everywhere.
- ``process_vm`` and ``arena``: the transport ``shm``, on one host.
- ``nccl``: between GPUs.

``near`` says which of them a session gets. The session itself is a ``connection``: what leaves is ``outgoing``, what comes
is ``incoming`` and goes to its place (``placing``), and ``turns`` says how much of it at once.
"""
