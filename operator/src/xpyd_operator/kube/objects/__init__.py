"""The objects of one service: judged by a dry run, made in their order, put back, and swept up once it is gone.

Belongs here: what is written of a rendered object. Does not belong here: what one looks like (``render``), the status
(``reports``).
"""
