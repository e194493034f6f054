"""Orders of adapters, what beats tell of them, and the digest in a path."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from xpyd_sidecar.contract import adapters
from xpyd_sidecar.contract.adapters import Adapter, AdapterOrder, AdapterProblem, AdapterState
from xpyd_sidecar.contract.membership import MAX_ALSO
from xpyd_sidecar.router.fleet.heartbeat_listener import MAX_MESSAGE

SQL, LAW = Adapter("sql", "/adapters/sql"), Adapter("law", "org/law-lora", "v2")


def test_an_order_is_known_by_what_is_in_it_and_not_by_its_sequence() -> None:
    order = adapters.order_of((SQL, LAW))
    assert order == adapters.order_of((LAW, SQL))
    assert order.digest == adapters.decode(adapters.encode(order)).digest
    assert order.digest != adapters.order_of((SQL,)).digest
    assert order.digest != adapters.order_of((SQL, Adapter("law", "org/law-lora", "v3"))).digest


@pytest.mark.parametrize(("raw", "words"), [
    (b"[]", "array"),
    (b'{"adapters": [{"name": "a b", "source": "/x"}]}', "name"),
    (b'{"adapters": [{"name": "a"}]}', "source"),
    (b'{"adapters": [{"name": "a", "source": "/x"}, {"name": "a", "source": "/y"}]}', "'a' stands there twice"),
    (b"\xff", "not an order"),
])
def test_what_is_no_order_is_refused_with_what_is_wrong(raw: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        adapters.decode(raw)


def test_an_order_of_too_many_names_is_refused_and_the_largest_one_fits_into_a_call_and_a_beat() -> None:
    names = [f"{index:04}{'x' * 28}" for index in range(adapters.MOST)]
    most = adapters.order_of(tuple(Adapter(name, "/" + "s" * 511, "r" * 256) for name in names))
    assert len(adapters.encode(most)) <= adapters.MOST_BYTES
    recent = adapters.latest([f"{index}{'x' * 120}" for index in range(adapters.MOST)])
    told = msgspec.msgpack.encode((names, recent, [AdapterProblem("n" * 128, "é" * 150)] * adapters.MOST_PROBLEMS))
    assert len(told) <= MAX_MESSAGE - 16 * 1024, "and something is left for what else a beat says"
    assert MAX_ALSO > adapters.MOST
    with pytest.raises(ValueError, match=f"{adapters.MOST + 1} adapters"):
        adapters.order_of((*most.adapters, SQL))
    with pytest.raises(ValueError, match="bytes together"):
        adapters.order_of(tuple(Adapter(f"{index}-{'x' * 100}", "/x") for index in range(400)))


def test_of_those_used_last_the_latest_are_told() -> None:
    assert adapters.latest(("a", "b")) == ("a", "b")
    assert adapters.latest([str(index) for index in range(1000)])[-2:] == ("998", "999")
    assert len(adapters.latest([str(index) for index in range(1000)])) == adapters.MOST_RECENT
    assert adapters.latest(("é" * adapters.RECENT_BYTES, "b")) == ("b",)


def test_a_state_of_another_order_tells_nothing_of_this_one() -> None:
    order = adapters.order_of((SQL, LAW))
    failed = AdapterProblem("law", "there is no folder")
    state = AdapterState(order.digest, ("own", "sql"), (failed,), 4)
    told = adapters.report(order, state)
    assert told is not None
    assert (told.order, told.waiting, told.problems, told.slots) == (order.digest, 1, (failed,), 4)
    of_before = adapters.report(order, msgspec.structs.replace(state, order="of before"))
    assert of_before is not None
    assert (of_before.waiting, of_before.problems) == (2, ())
    untold = adapters.report(order, None)
    assert untold is not None
    assert untold.waiting == 2
    assert adapters.report(None, None) is None


def test_who_was_told_none_needs_no_empty_order() -> None:
    none, some = AdapterOrder(), adapters.order_of((SQL,))
    assert adapters.follows("", none)
    assert not adapters.follows("", some)
    assert adapters.follows(some.digest, some)
    assert not adapters.follows(some.digest, none), "what was told must be taken back"


def test_a_path_tells_what_the_files_are_only_where_it_is_a_link_of_ours() -> None:
    digest = "0" * 60 + "beef"
    assert adapters.digest_in(str(adapters.link_of(Path("/run/xpyd"), digest))) == digest
    for path in ("/models/adapters/sql", f"/run/adapters/{digest}/more", f"/run/adapters/{digest[1:]}", "org/law-lora"):
        assert adapters.digest_in(path) is None, path


def test_an_order_and_a_state_are_kept_in_the_run_folder(tmp_path: Path) -> None:
    assert adapters.read_order(tmp_path) is None
    assert adapters.read_state(tmp_path) is None
    order, state = adapters.order_of((SQL,)), AdapterState(loaded=("sql",))
    adapters.write_order(tmp_path, order)
    adapters.write_state(tmp_path, state)
    assert (adapters.read_order(tmp_path), adapters.read_state(tmp_path)) == (order, state)
    (tmp_path / adapters.FILE).write_text("{")
    with pytest.raises(ValueError, match=adapters.FILE):
        adapters.read_order(tmp_path)
