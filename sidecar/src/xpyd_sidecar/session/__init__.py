"""What goes on between one prefill and one decode engine, and between two of their ranks.

    prefill rank                                            decode rank
    sender ─▶ prefill_endpoint ◀─ connection ─▶ decode_endpoint ◀─ receiver
              prefill_link_choice                decode_handshake, block_receiver
    spilling                                                lookup_buffer

    control    the same between schedulers: who is there, what is announced, who lives

``link_choice`` says which link a session gets. Belongs here: handshakes, what is asked and answered, what is owed,
liveness, the I/O threads that serve it. Does not belong here: how bytes travel (``transport``), decisions of a transfer
(``kv.sending``, ``kv.receiving``), vLLM and tensors (``engine``).
"""
