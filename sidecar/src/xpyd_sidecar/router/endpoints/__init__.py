"""What is served where: the table of paths behind the server, and the router's own pages.

Belongs here: judging a request by its head, handing it to ``request``, and answering what is the router's own. Does not
belong here: which paths there are (``api.paths``), HTTP (``http``).
"""
