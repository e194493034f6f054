"""The instances: who they are, how they are, and who says so.

Belongs here: heartbeats, probes, the roster, deaths. Does not belong here: who of them gets
a request (``balance``), requests (``request``).
"""
