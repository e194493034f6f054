"""The operator: the API, the planner, two backends (Kubernetes and local processes), and the ``xpyd`` command.

It never imports vLLM or torch, and of the sidecar package only ``contract``.
"""

__version__ = "0.1.0"
