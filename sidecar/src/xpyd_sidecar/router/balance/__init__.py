"""Whose turn it is, and which instances serve it.

Belongs here: policies, loads, what prefixes are where, how many requests an instance and a key may have, how many retries
there are. Pure: no I/O, time and seeds are arguments. Does not belong here: who is there at all (``fleet``).
"""
