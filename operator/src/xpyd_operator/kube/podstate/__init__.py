"""What the pods of a service say of themselves: facts, and why one is not ready. Pure.

Belongs here: one pod at a time. Does not belong here: instances, which routers know as well (``routers.observe``).
"""
