"""The CRDs as structs: decoding, defaults, cross-field checks, schema. No I/O.

    service, pool, status     the two kinds; model, roles, kv, router, operation: the sections of a service's spec
    base                      the root struct and the kinds of text that fields hold
    quantity, durations, source   what such text means
    gone                      settings and words that are no more, each with what to write instead
    walk, decode, load        from untyped data or YAML text to structs, with every fault and its path
    checks, owned             rules across fields, each beside its CEL twin
    templates                 pod templates: how one is laid over another
    device_keys, devices      what a key of a resource is, and which devices an instance gets
    tables                    what is made from others' sources: kubernetes (fields), options (of vLLM)
    outside                   everything that points out of the document: addresses, the hub's token and caches
    notes, vllm               what is worth saying, and what engines would not start with
    schema, crds, reference   what is generated from the structs

Does not belong here: what a service looks like as pods or processes (render), and reading files (cli).
"""
