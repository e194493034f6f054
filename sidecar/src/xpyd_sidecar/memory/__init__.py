"""Memory of a rank beside the KV cache: who has how much of it, until when, and copies between it and a GPU.

    store         copies that wait to leave: one allocation, one account
    staging       chunks for what comes
    marks         moments in the order of copies; ``completions`` waits for them on a thread
    device        blocks of a cache on a GPU to packed memory and back, by ``device_kernel`` and tables of ``device_rows``

Belongs here: bytes, leases, events. Does not belong here: which blocks (``engine``, ``kv``), how they travel
(``transport``).
"""
