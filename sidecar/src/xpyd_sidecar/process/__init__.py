"""What every process of the sidecar needs of its host: sockets, logs, limits of memory and files, waiting, keys of ZMQ.

Belongs here: what knows neither routers nor engines. Does not belong here: formats that two processes share (``contract``).
"""
