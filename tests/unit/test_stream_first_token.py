"""Prefill's own stream of one token, however its bytes arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest

from xpyd_sidecar.router.stream.events import END
from xpyd_sidecar.router.stream.replay_recorder import FirstToken

EVENT = (b'data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"tiny","choices":[{"index":0,"text":" a",'
         b'"logprobs":null,"finish_reason":"length","stop_reason":null,"token_ids":[5]}],"usage":null}\n\n')
USAGE = (b'data: {"id":"cmpl-1","object":"text_completion","created":7,"model":"tiny","choices":[],'
         b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n')
STREAM = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (EVENT, USAGE)) + END


@pytest.mark.parametrize("framed", [True, False])
@pytest.mark.parametrize("reads", [
    [len(STREAM)], [STREAM.index(b"\r\ndata") + 2 + len(EVENT) + 2], [len(STREAM) - len(END)], [len(STREAM) - 5],
    [STREAM.index(END) + 3], list(range(1, len(STREAM)))])
def test_only_the_token_goes_to_the_client_and_prefills_end_does_not(reads: list[int], *, framed: bool) -> None:
    stream = FirstToken(framed=framed)
    cuts = [0, *[cut for cut in reads if cut < len(STREAM)], len(STREAM)]
    out = [given for start, end in pairwise(cuts) if (given := stream.feed(STREAM[start:end]))]
    assert len(out) == 1
    assert b'"text":" a"' in out[0]
    assert b'"finish_reason":null' in out[0]
    assert b"[DONE]" not in out[0]
    assert b"usage\":{" not in out[0]
    assert stream.ended
    assert stream.done
    assert [one.choices[0].finish_reason for one in stream.events] == [None]
