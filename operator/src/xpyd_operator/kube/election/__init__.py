"""Which of the operator's replicas works: a Lease, and who holds it.

Belongs here: whether to work. Does not belong here: what works (``app``).
"""
