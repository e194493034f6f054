"""From what is wanted and what is observed to what to do next.

Pure: time enters as an argument; no address and no file is known here.
"""
