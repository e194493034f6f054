"""The rules that keep data-parallel ranks in step, as pure values.

A model with experts spread over data-parallel ranks runs a forward on all ranks together or not at all. Belongs here: who
is entitled to which forward, when a rank runs a dummy, how a pause and an end are agreed. Does not belong here: sockets,
shared memory, threads, clocks, vLLM. Time is an argument. docs/protocols/dp-step.md is the protocol, with its proof
obligations.

    rank          one participant: forwards begun, steps granted, votes
    coordinator   joins what the ranks say
    look_ahead    how many steps a rank asks for at once
    frames        what goes over a link: the sender's whole state
    watch         whose silence has lasted too long
"""
