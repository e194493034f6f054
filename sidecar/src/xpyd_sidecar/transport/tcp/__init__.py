"""The connection of a session, and blocks that travel on it.

    connection ─▶ frame_reader, frame_writer ─▶ placement, fairness
    link          puts blocks into frames of the connection

Belongs here: one socket, frames in and out. Does not belong here: what frames mean (``session``), their layout
(``kv.frames``).
"""
