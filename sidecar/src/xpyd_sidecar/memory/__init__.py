"""Memory of a rank beside the KV cache: who has how much of it, until when, and copies between it and a GPU.

    allocation    host memory that is made and given back by a thread that may wait; ``registration`` has CUDA lock it
    store         copies that wait to leave: one allocation, one account
    marks         moments in the order of copies; ``completions`` waits for them on a thread
    device        blocks of a cache on a GPU to packed memory and back, by ``device_kernel`` and tables of ``device_rows``,
                  which go through ``launch_memory``
    mapped_store  another process's store, which CUDA is told of in parts
    node_binding  memory and threads at the NUMA node of the rank's device, which ``numa_nodes`` reads and ``numa_policy``
                  tells the kernel

Belongs here: bytes, leases, events. Does not belong here: which blocks (``engine``, ``kv``), how they travel
(``transport``).
"""
