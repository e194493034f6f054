"""The link ``tcp``: stripes, on which bytes are asked for and sent by threads that do without the interpreter.

    decode   fetch ── pool ══ request: 64 bytes ══▶ pool ── serve   prefill
                      rows ◀═ header: 16 bytes, and the bytes ══ copies of the store

Belongs here: who owns which stripe, how one begins, and what its end means. Does not belong here: loops over sockets
(``transport._stripes``), who is at the other end (``session``), what is fetched when (``kv.fetching``).

    D connects to prefill's address and says NAME (32 bytes that only the two ends can make: ``session_keys.stripe_name``);
      what prefill has said by then (CHALLENGE: it cannot know what comes) is passed over
    P ── 32 bytes that only it can make (``stripe_answer``) ──▶ D
    D ── REQUEST: serial u32 | transfer (16) attempt u32 generation u32 manifest u32 |
                  offset u64 size u64 step u64 count u32 | 0 u32 ──▶ P
    P ── HEADER: serial u32 | 0 there, 1 gone u32 | bytes u64 ── bytes ──▶ D, in the order of the requests, counted from 0
"""
