"""The status of a service and of its pools, and how it is written.

Belongs here: what only a cluster adds. Does not belong here: conditions that a host has, too (``plan.conditions``).
"""
