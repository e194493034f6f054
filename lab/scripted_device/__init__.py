"""Prefill and decode on a scripted device: the real connector of both sides, and around it what vLLM and an H200 take.

Two processes, an engine core of vLLM's each with its own scheduler and busy loop. The connector, its threads, sockets and
the link ``shm`` are as they are; no byte of KV is there. What is scripted stands in five places, so that it can be put
under other code:

    device        streams, events, copies, launches: when copies are complete, what enqueuing them costs the host
    byte_work     what cores do with bytes: counted, and where it is CUDA's, as waits that leave the interpreter alone
    engine_loop   the model runner: what a step computes, for how long, and its Python, which holds the interpreter
    router_legs   both requests of a prompt, as the router sends them
    counting      messages, wake-ups, naps, calls, launches, and each thread's processor time

``parameters`` has every figure with its source, and the formulas; ``report`` what comes of a run. Both are pure.
"""
