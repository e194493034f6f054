"""Errors of the test cluster.

    ClusterError
    ├── Missing           the host lacks something that this program cannot install
    ├── BuildFailed       a Go program does not compile; carries the end of the compiler's output
    ├── ComponentFailed   a component ended or is not ready in time; carries the end of its log
    ├── CommandFailed     kubectl, ctr, ip … said no; carries what it said
    └── InUse             another cluster, or another program, holds what this one needs
"""

from __future__ import annotations


class ClusterError(Exception):
    """Root of the tree; its message is fit for a user."""


class Missing(ClusterError):
    """The host lacks something."""


class BuildFailed(ClusterError):
    """A Go program does not compile."""


class ComponentFailed(ClusterError):
    """A component ended, or is not ready in time."""


class CommandFailed(ClusterError):
    """A command that was run to its end failed."""


class InUse(ClusterError):
    """Somebody else holds what is needed."""
