"""The Kubernetes that the tests of xpyd run on: real components from pinned sources, beside whatever the host has.

    light   etcd, API server and controller manager on loopback; several side by side; optional scheduler and fake nodes
    full    one node more: containerd, kubelet, kube-proxy, pod network, DNS, network policies; one per host

What belongs here: building the programs, starting, breaking, healing and removing a cluster. What does not: anything that
knows xpyd. A cluster is a folder; whatever belongs to it is found through that folder, also after a crash.

    build, packages              programs from Go modules; for a node, from the distribution too
    state, runner                the folder, and the processes that it records
    pki, control_plane, kubectl  certificates, the components' command lines, the client
    light                        the light cluster
    network, node, images        what a node needs of the kernel and of containerd
    addons, full                 DNS, network policies, fake nodes; the full cluster
    remains                      everything that is left of a cluster, and its removal
"""
