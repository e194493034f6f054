"""A model of a service under a trace: engines, fleet, planner and what it is compared with.

Belongs here: arithmetic and events on plain values; randomness and time enter as arguments. Does not belong here: reading
files, drawing, printing (``cli/simulate``).
"""
