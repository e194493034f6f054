"""One service from its document to its status: the backend of the planner's rounds, what goes with it, and the tasks of
all services.

Belongs here: what knows all other rooms of ``kube``. Does not belong here: anything that one of them can say alone.
"""
