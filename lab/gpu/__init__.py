"""``check-gpu``: what xpyd does on a GPU by the connector's own code, on a machine with torch and CUDA, without vLLM.

What belongs here: the command (``__main__``), what runs each check in a process of its own (``runner``), how a check tells
what it has found (``findings``), what machine it is (``machine``, for ``lab.gpu_engines`` too), and the checks by what they
are of:

    order_checks            copies beside the compute stream
    layout_checks           caches as backends lay them out
    cost_checks             times, launches, a forward beside copies
    graph_checks            CUDA graphs
    host_checks             a rank's own host memory
    node_checks             NUMA nodes of memory and threads (``page_nodes``)
    mapping_checks          another process's, mapped
    link_checks             whole links between two ranks (``link_ranks``)
    group_checks            NCCL groups of two processes (``group_ends``)

``runner``, ``findings``, ``machine`` and ``children`` import no torch. What needs vLLM's engines is in ``lab.gpu_engines``.
"""
