"""The launcher of a member: the process that stays while engines of one life after the other come and go.

    __main__.py   waits for a life, starts the engine, ends it; when to give up
    remains.py    processes that an engine has left behind

Does not belong here: when a life begins and ends (``agent.group``).
"""
