"""What operator, sidecar and engine agree on.

Belongs here: names, wire messages, configuration and keys that two parts must read alike. Does not belong here: anything
that acts (sockets, processes, policy). Every message is a msgspec struct that tolerates unknown fields, so that versions
N and N-1 can meet during an upgrade.
"""
