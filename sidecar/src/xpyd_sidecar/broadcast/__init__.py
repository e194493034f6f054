"""The broadcast queue: one writer, many readers, every message to each of them, in order.

Belongs here: the ring in shared memory and its flags, the link over which a local reader joins, the ZMQ link of readers on
other hosts, and the calls (method and arguments, answers by rank) made on top. Payload is bytes; what they mean is the
caller's business. Does not belong here: vLLM, torch, and anything that knows what is being said.

    layout    where everything lies in the segment, as arithmetic
    ring      the flags: who may write and read which chunk, and when (pure; docs/protocols/broadcast.md)
    message   how a message of several buffers lies in a chunk
    futex     parking and waking on a word of shared memory; fences
    segment   the memory itself: sealed memfds, which have no name and so leave nothing behind
    wire      what is said at joining, and handles
    local     readers of this host: joining, liveness, side segments
    remote    readers elsewhere: ZMQ
    shared    the writer's half of the ring, and side segments for messages larger than a chunk
    queue     the writer's end
    reader    the readers' end
    calls     what calls and answers look like
    rpc       calls to all or some workers, answers by rank; worker: their end
"""
