"""What a plan looks like in Kubernetes and as local processes. Pure: no I/O, no addresses but those that are given.

    engine        vLLM of a role: arguments, environment, revision         both backends
    layout        the members of an instance, each with its engine         both backends
    sections      configuration of routers and agents                      both backends
    process       the processes of one host
    pod           the pod of an engine      sidecar    its containers beside the engine, and a router's
    group         what instances of several pods have besides
    objects       all other objects         policies   who reaches the pods, and how many may be evicted
    overlay       the user's template, laid over a pod
    unsupported   what a document may say and a backend cannot do
    switch        whether instances of one role could be of the other
    labels        labels, names, owners     paths      files, ports and users inside a pod
    compare       whether an object is as it was applied
    defaults      what a document states beside its defaults

    objects ─▶ pod, sidecar ─▶ layout ─▶ engine        process ─▶ layout, sections
"""
