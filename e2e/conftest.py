"""All tests here share one whole cluster."""

from whole_cluster import cluster, images, operator, service, shared  # noqa: F401 (fixtures)
