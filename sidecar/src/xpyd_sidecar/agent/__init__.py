"""Speaks for one engine: heartbeats, health, drain, role.

    engine.py   looks at the engine: health, record, load            I/O
    beat.py     what follows from the looks: state, drained, beats   pure
    beats.py    carries beats to every router, and their acks back   I/O
    control.py  unix socket: status, drain, undrain, role            I/O
    remote.py   the same for a role over the network, with a token   I/O
    role.py     files that tell the role                             I/O
    group.py    rounds of an instance of several members             pure
    pulses.py   whether the workers of a member go on                pure
    rounds.py   a member among the others: launcher, hellos          I/O
    ask.py      its client, for preStop hooks                        I/O
    app.py      puts them together

Does not belong here: choosing instances (``router``), moving KV (``engine``).
"""
