"""What the operator and the routers of a service tell each other, by signed calls: the fleet, roles, adapters, wakes; and
what of it is seen of the instances.

Belongs here: calls, and what their answers mean. Does not belong here: decisions (``scaling``, ``plan``).
"""
