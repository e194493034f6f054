"""Campaigns on a whole cluster share the fixtures of e2e."""

from whole_cluster import cluster, images, operator, service, shared  # noqa: F401 (fixtures)
