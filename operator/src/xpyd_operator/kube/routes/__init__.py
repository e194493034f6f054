"""Objects of the Gateway API: whether their kinds are served, and what Gateways say of a route.

Belongs here: all services at once, and what is pure. Does not belong here: the route of one service (``service.gateway``).
"""
