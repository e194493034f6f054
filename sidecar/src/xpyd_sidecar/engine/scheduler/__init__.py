"""The connector beside vLLM's scheduler: pairing, offers, what the agent is told of steps and caches.

Belongs here: what runs in the engine's core. Does not belong here: memory of a device (``engine.worker``).
"""
