"""The container images of xpyd: what is in them, and how they are built from Debian packages and pinned wheels.

    python -m images build     operator, sidecar, engine-cpu → OCI archives in the cache, nothing where nothing changed
    python -m images push      operator and sidecar → a registry
    python -m images paths     what a pod of engine-cpu mounts from the host

``--platforms amd64,arm64`` makes an index of both. Nothing of an image runs while it is built, so any machine makes each.

Belongs here: build time only, the standard library alone. Nothing of xpyd imports it.
"""
