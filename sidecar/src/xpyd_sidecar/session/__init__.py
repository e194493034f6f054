"""What goes on between one prefill and one decode engine, and between two of their ranks.

    prefill rank                                                            decode rank
    publisher ─▶ prefill_session ◀─ control_connection, greeting ─▶ decode_session ◀─ receiver
    stored_copy                                                     link_trial

    control    the same between schedulers: who is there, what is announced, who lives

``link_trial`` says which link a session gets, ``worse_links`` what people are told of it. Belongs here: handshakes, what is
asked and answered, what is owed, liveness, the I/O threads that serve it. Does not belong here: how bytes travel
(``transport``), decisions of a transfer (``kv.publishing``, ``kv.fetching``, ``kv.receiving``), vLLM and tensors
(``engine``).
"""
