"""What clients may ask: paths, fields, and what each of them means for how a request is served.

Belongs here: tables and what is read of a request's bytes by them; errors as clients see them. Pure: no I/O, no clock. Does
not belong here: what engines answer (``stream``), who answers (``balance``), sockets (``http``).
"""
