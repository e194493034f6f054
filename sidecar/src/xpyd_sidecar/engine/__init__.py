"""The connector: xpyd inside vLLM.

Belongs here: what needs vLLM's hooks, torch tensors, or the threads and sockets of an engine process. Does not belong here:
rules of a transfer (``kv``), what other parts read (``contract``). ``compat`` alone imports vLLM.

    connector       what vLLM loads; hands every hook to one of the two sides
    scheduler_side  pairing and offers; its thread is ``control``
    worker_side     copies out and in; its threads are ``sender`` and ``receiver``, which move bytes over ``links``
"""
