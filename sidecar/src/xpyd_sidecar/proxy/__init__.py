"""Sockets around routing: HTTP server, upstream connections, heartbeats, admin paths, metrics."""
