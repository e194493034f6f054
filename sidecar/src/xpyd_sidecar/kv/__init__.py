"""The rules of moving KV from prefill to decode, as pure values and state machines.

Belongs here: identities, arithmetic on blocks, wire layouts, and the machines of a transfer (per side one beside the
scheduler, the others beside the worker). Does not belong here: sockets, threads, clocks, tensors, vLLM. Time is an
argument; machines take events and return instructions.

    prefill engine                                   decode engine
    offers     (scheduler)  ── ANNOUNCE, GONE ──────▶    pairing              (scheduler)
               ▲            ◀─ DROP ─────────────────
    publishing (worker)     ◀─ ASK, TAKEN, DONE ─────    receiving, fetching  (worker)
                            ── MANIFEST, SUMS, GONE ─▶
"""
