"""The rules of moving KV from prefill to decode, as pure values and state machines.

Belongs here: identities, arithmetic on blocks, wire layouts, and the four machines of a transfer (two per side: one beside
the scheduler, one beside the worker). Does not belong here: sockets, threads, clocks, tensors, vLLM. Time is an argument;
machines take events and return instructions.

    prefill engine                                   decode engine
    offers    (scheduler)  ── ANNOUNCE, GONE ──▶     pairing   (scheduler)
              ▲            ◀─ DROP ────────────
    sending   (worker)     ◀─ READY, DONE, CANCEL ─  receiving (worker)
                           ── DATA, GONE ─────────▶
"""
