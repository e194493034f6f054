"""What is wrong with a host or a service, most harmful first, with evidence and what to do.

    cli/doctor ──reads──▶ Examination ──examine──▶ findings ──order──▶ words, or JSON

Belongs here: what was read as plain values, what follows from it. Does not belong here: reading files or
routers, printing (``cli/doctor``, ``cli/host_facts``), a model of engines (``simulation``).
"""
