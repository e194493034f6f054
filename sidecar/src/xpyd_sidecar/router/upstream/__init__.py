"""Connections to engines, and the calls on them.

Belongs here: opening, reusing and reading connections, one pool for all requests. Does not belong here: what is asked and
what follows from an answer (``request``), the bytes of a stream (``stream``).
"""
