"""The connector: xpyd inside vLLM.

Belongs here: what needs vLLM's hooks, torch tensors, or the threads and sockets of an engine process. Does not belong here:
rules of a transfer (``kv``) or of steps (``dp``), what other parts read (``contract``). ``compat`` and ``dp_plugin.compat``
alone import vLLM.

    connector       what vLLM loads; hands every hook to one of the two sides
    scheduler_side  pairing and offers; its thread is ``control``
    crew            the scheduler side's calls to all workers beside a step's orders
    worker_side     copies out and in; its threads are ``sender`` and ``receiver``, which move bytes over ``links``
    dp_plugin       keeps data-parallel ranks in step; ``step_stats`` takes what it counts to the connector's statistics
"""
