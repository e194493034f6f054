"""The launcher of a member: the process that stays while engines of one life after the other come and go.

    wanted.py     what follows from what the agent says and what runs; when to give up    pure
    __main__.py   waits for a life, starts the engine, ends it                            I/O

Does not belong here: when a life begins and ends (``agent.group``).
"""
