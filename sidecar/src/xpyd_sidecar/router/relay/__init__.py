"""What is done for every token: the loop's reads, writes, and scans of events, in C and in Python.

Belongs here: the C sources, the modules that choose between them and the same in Python, and nothing that costs less than
a microsecond a token to leave in Python. Does not belong here: anything that decides.
"""
