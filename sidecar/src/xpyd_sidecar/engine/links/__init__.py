"""Ways to move blocks between two engines, behind one interface (``base``).

- ``tcp``: frames of the session itself, everywhere.
- ``process_vm`` and ``arena``: the transport ``shm``, on one host.

``near`` says which of them a session gets.
"""
