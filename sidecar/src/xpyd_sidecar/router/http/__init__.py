"""HTTP/1.1 with clients, and what a process needs for it: timers that know of pauses, the budget of bodies, names.

Belongs here: framing, connections, deadlines, keys, TLS. Does not belong here: what a path means (``endpoints``),
connections to engines (``pool``).
"""
