"""Requests that are counted many at a time are counted as each of them would be."""

from __future__ import annotations

import io
import json
import logging
import math
import random
import re
from datetime import UTC, datetime

import msgspec
import pytest

from xpyd_sidecar.contract.ids import InstanceName, Role, TransferId
from xpyd_sidecar.process import logs
from xpyd_sidecar.router.observing.batch import MAX_PAIRS, Batch, Counting, of_records
from xpyd_sidecar.router.observing.history import History
from xpyd_sidecar.router.observing.metrics import RouterMetrics
from xpyd_sidecar.router.observing.observer import AccessLine, access, line_of
from xpyd_sidecar.router.observing.record import LegRecord, Record

CHANGES: tuple[dict[str, object], ...] = (
    {"detail": 'it "broke"'}, {"skips": "short", "legs": []}, {"first_at": math.nan, "status": 502},
    {"path": "/v1/messages"}, {"stream": False}, {"continued": 2, "attempt": 3})
"""Of requests that did not go as most do; each still says that it went well."""


def made_up(dice: random.Random, instances: int) -> Record:
    at = 100.0 + dice.random()
    opened = at + dice.choice([0.0, 1e-5, 0.2])
    prefilled, begun = opened + dice.random(), opened + dice.random() ** 6 * 40
    ended = max(begun, prefilled) + dice.choice([0.0, dice.random()])
    tokens = dice.choice([-1, 0, 1, 2, 7, 300])
    prefill, decode = InstanceName(f"p{dice.randrange(instances)}"), InstanceName(f"d{dice.randrange(instances)}")
    return Record(
        f"r-{dice.random()}", TransferId("ab" * 16), dice.choice(("chat", "completions")), True, at, 1.7e9, "ok", 200,
        first_at=begun, last_at=ended, tokens=tokens, prompt_tokens=-1 if tokens < 0 else dice.randrange(5000),
        prompt_size=dice.randrange(5000), attempt=1, bytes=dice.randrange(100_000), legs=[
            LegRecord(Role.PREFILL, prefill, 1, opened, prefilled, prefilled, "2xx"),
            LegRecord(Role.DECODE, decode, 1, opened, begun, ended, "2xx")])


def told(metrics: RouterMetrics, history: History, counting: Counting) -> dict[str, object]:
    """What there is to see of them; sums of seconds to nine digits, since they may be added in another order."""
    shown = metrics.text().decode()
    text = re.sub(r" (\d+\.\d+(?:e-\d+)?)$", lambda match: f" {float(match[1]):.9g}", shown, flags=re.MULTILINE)
    history.advance(1e10, 0, 0)
    second = msgspec.to_builtins(msgspec.structs.replace(history.seconds[0], flows={}))
    flows = {pair: (flow.count, round(flow.seconds, 6)) for pair, flow in history.seconds[0].flows.items()}
    lines = sorted(line for line in text.splitlines() if not re.search("python_|process_|_created", line))
    return {"metrics": lines, "second": second, "flows": flows, "totals": msgspec.to_builtins(counting.totals()),
            "total": (metrics.requests_total, metrics.requests_failed)}


def count(batch: Batch, metrics: RouterMetrics, history: History, counting: Counting) -> None:
    metrics.count_batch(batch)
    history.on_closed(batch)
    counting.on_closed(batch)


@pytest.mark.parametrize("instances", [2, 3 * int(MAX_PAIRS ** 0.5)])
def test_a_batch_is_counted_as_each_of_its_requests(instances: int) -> None:
    dice = random.Random(instances)
    those = [made_up(dice, instances) for _ in range(800)]
    one, many = [(RouterMetrics(lambda: ()), History(1e9), Counting(0.0)) for _ in range(2)]
    for api in ("chat", "completions"):
        of = [each for each in those if each.api == api]
        for each in of:
            count(of_records(api, [each]), *one)
        count(of_records(api, of), *many)
    alone, together = told(*one), told(*many)
    for what, value in alone.items():
        assert together[what] == value, what


def test_its_access_line_is_that_of_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    dice = random.Random(1)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers.copy())
    monkeypatch.setattr(root, "level", root.level)
    for style in ("json", "text"):
        stream = io.StringIO()
        logs.configure("info", "json" if style == "json" else "text", stream, service="s", instance='i"1')
        those = [made_up(dice, 3) for _ in range(50)]
        those += [msgspec.structs.replace(one, **change) for one, change in zip(those, CHANGES, strict=False)]
        logs.tell_all(access, those, AccessLine())
        together = stream.getvalue().splitlines()
        stream.truncate(0)
        stream.seek(0)
        for one in those:
            access.info("%s", "ok", extra=line_of(one))
        alone = stream.getvalue().splitlines()
        assert len(together) == len(alone) == len(those)
        if style == "text":
            assert [line.partition(" ")[2] for line in together] == [line.partition(" ")[2] for line in alone]
            continue
        for mine, theirs in zip(map(json.loads, together), map(json.loads, alone), strict=True):
            assert list(mine) == list(theirs)
            assert mine | {"time": ""} == theirs | {"time": ""}
        ended = [datetime.fromtimestamp(one.arrived_unix + one.last_at - one.arrived, UTC) for one in those]
        assert [json.loads(line)["time"] for line in together] == [
            at.isoformat(timespec="milliseconds").replace("+00:00", "Z") for at in ended]
