"""Driving an OpenAI endpoint with requests, and what came of them.

Belongs here: what is sent when (``workload``), sending it (``drive``), measures (``measures``). Does not belong here:
arguments and printing (``cli/bench``).
"""
