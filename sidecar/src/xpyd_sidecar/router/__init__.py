"""The router: clients' requests in, attempts on engines out, one answer back.

    app ─▶ endpoints ─▶ serving ─▶ observing, balance, upstream, fleet, stream, http ─▶ relay, api

Each room knows those behind it in this order, and none before it; ``make lint`` holds that (docs/decisions/0028).

Belongs here: what puts a router together and runs it (``app``). Everything else has a room.
"""
