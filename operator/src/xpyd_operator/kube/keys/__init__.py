"""The key of a service in a cluster: the master that it is derived from, the Secret that pods have it from, and when all
of them have another one.

Belongs here: which key a pod has. Does not belong here: what a key opens (``contract.keys`` of the sidecar).
"""
