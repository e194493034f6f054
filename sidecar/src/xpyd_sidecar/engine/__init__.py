"""The connector: xpyd inside vLLM.

    engine ─▶ session ─▶ transport ─▶ memory ─▶ threads ─▶ kv ─▶ contract

Each of these packages knows those behind it in this order, and none before it (docs/decisions/0013).

    connector        what vLLM loads; hands every hook to one of the two sides
    scheduler        pairing and offers: ``scheduler_side`` has the hooks, ``scheduler_actions`` carries out what is
                     decided, ``control_handler`` tells what peers say
    worker           the cache of a rank: ``worker_side`` has the hooks, ``saving`` copies out for the publisher,
                     ``loading`` counts what came
    reports          what the two sides hand each other through vLLM; ``worker_rpc`` calls all workers beside that
    compat           the version of vLLM; with ``dp_plugin.compat`` alone it imports vLLM
    model_download   a program of its own: brings the hub's files before an engine starts
    dp_plugin        keeps data-parallel ranks in step; ``stats`` has what it counts, too

Belongs here: what needs vLLM's hooks or its tensors. Does not belong here: what goes on with a peer (``session``), how
bytes travel (``transport``), rules of a transfer (``kv``) or of steps (``dp``), what other parts read (``contract``).
"""
