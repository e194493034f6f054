"""Instances of several pods: the PodGroups by which schedulers place them as a whole, and the labels of nodes.

Belongs here: what a scheduler is told. Does not belong here: the pods themselves (``objects.pods``).
"""
