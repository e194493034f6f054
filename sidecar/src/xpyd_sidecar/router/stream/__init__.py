"""What is read of engines' answers: events, token ids, usage, how one broke off, and how it goes on elsewhere.

Belongs here: readers of an answer's bytes, where a client is in its stream, and what another engine is asked behind that.
Does not belong here: whether to ask another one (``request``), the connections (``pool``).
"""
