"""The counts of one service: when its planner looks, and when it goes to no instances and comes back.

Belongs here: when to decide, and writing the pools. Does not belong here: the decision (``plan.planner``, ``plan.zero``).
"""
