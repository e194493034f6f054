"""A router of several processes: one owns membership, the others serve clients.

Belongs here: the processes, what they tell each other, and what a worker does otherwise than a router of one process. Does
not belong here: anything that a router of one process needs.
"""
