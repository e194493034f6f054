"""Threads of the connector: what they run on, how they wait, and what becomes of the engine when one of them dies.

    loop              one selector, on which a rank's publisher or receiver runs
    watched           a thread whose death ends the engine; ``termination_log`` keeps its last words for Kubernetes
    processors        on which processors a thread runs
    idle_polling      how an engine that only waits for KV looks less often

Belongs here: what any thread of any room may need. Does not belong here: what a thread does.
"""
