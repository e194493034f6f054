"""The course of a request: let in, sent to engines, moved where one fails, answered.

Belongs here: what requests share (``context``), the exchange that decides, the request that carries it out, its attempts,
requests that are held, and requests that end engines. Does not belong here: the parts that it is made of (the rooms behind
it).
"""
