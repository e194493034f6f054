"""The broadcast queue in the place of vLLM's, with the sources of each version that is known; no engine."""

from __future__ import annotations

import logging
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import zmq
from executor_hosts import LIFE, SERVICE_KEY, SETTINGS, Bomb
from vllm_places import MODULE

from xpyd_sidecar.broadcast import wire
from xpyd_sidecar.broadcast.layout import Layout
from xpyd_sidecar.broadcast.message import PARTS_MAX
from xpyd_sidecar.contract import keys, launch
from xpyd_sidecar.contract.group import ENV_LIFE
from xpyd_sidecar.contract.keys import ServiceKey
from xpyd_sidecar.engine.compat import sources
from xpyd_sidecar.engine.dp_plugin import register
from xpyd_sidecar.engine.executor_queue import compat, patch, pickles
from xpyd_sidecar.engine.executor_queue import queue as queues
from xpyd_sidecar.engine.executor_queue.queue import ExecutorReader, ExecutorWriter
from xpyd_sidecar.engine.executor_queue.settings import QueueSettings
from xpyd_sidecar.errors import AuthError, ConfigError, OurFault, PeerGone
from xpyd_sidecar.process import curve

# --- which vLLM ---


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts in its place is vLLM's again after it."""
    monkeypatch.setattr(compat.shm_broadcast, "MessageQueue", compat.MessageQueue)
    monkeypatch.setattr(compat.multiproc_executor, "MessageQueue", compat.MessageQueue)
    monkeypatch.setattr(compat.MultiprocExecutor, "_init_executor", patch._STOCK)
    monkeypatch.setattr(ExecutorWriter, "settings", QueueSettings())


def in_place() -> list[bool]:
    return [compat.shm_broadcast.MessageQueue is ExecutorWriter, compat.multiproc_executor.MessageQueue is ExecutorWriter,
            compat.MultiprocExecutor._init_executor is not patch._STOCK]


@pytest.fixture
def other_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.PINNED[MODULE]["multiproc_executor"], "WorkerProc.worker_main", "0" * 16)
    monkeypatch.setitem(compat.PINNED[MODULE]["shm_broadcast"], "MessageQueue.gone", "0" * 16)


def test_this_vllm_is_the_one_that_the_queue_was_fitted_to() -> None:
    compat.check_sources()
    assert all(sum(map(len, pinned.values())) > 35 for pinned in compat.PINNED.values())


@pytest.mark.usefixtures("other_sources")
def test_other_sources_are_refused_by_their_names() -> None:
    said = r"MessageQueue\.gone of vllm\S*shm_broadcast; WorkerProc\.worker_main of vllm\S*multiproc_executor differ"
    with pytest.raises(ConfigError, match=said):
        compat.check_sources()


@pytest.mark.usefixtures("stock")
@pytest.mark.parametrize("word", [None, "vllm"])
def test_nothing_is_replaced_unless_it_is_asked_for(word: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launch.ENV_QUEUE, raising=False)
    if word is not None:
        monkeypatch.setenv(launch.ENV_QUEUE, word)
    register()
    assert in_place() == [False] * 3


@pytest.mark.usefixtures("stock")
def test_it_takes_its_places_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.ENV_QUEUE, "xpyd")
    monkeypatch.delenv(launch.ENV_KEY_FILE, raising=False)
    register()
    first = compat.MultiprocExecutor._init_executor
    register()
    assert in_place() == [True] * 3
    assert compat.MultiprocExecutor._init_executor is first


@pytest.fixture
def member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of an engine that is one of several members."""
    keys.write(tmp_path / "key", SERVICE_KEY)
    for name, value in ((launch.ENV_QUEUE, "xpyd"), (launch.ENV_KEY_FILE, str(tmp_path / "key")), (ENV_LIFE, LIFE)):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("stock", "other_sources")
def test_on_one_host_another_vllm_keeps_its_own_queue_with_a_warning(monkeypatch: pytest.MonkeyPatch,
                                                                     caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(launch.ENV_QUEUE, "xpyd")
    monkeypatch.delenv(launch.ENV_KEY_FILE, raising=False)
    monkeypatch.delenv(ENV_LIFE, raising=False)
    with caplog.at_level(logging.WARNING):
        register()
    assert in_place() == [False] * 3
    (said,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert said.startswith("xpyd: vLLM's own queue is under its executor: vLLM ")


@pytest.mark.usefixtures("stock", "other_sources", "member")
def test_a_member_of_several_does_not_start_with_another_vllm() -> None:
    with pytest.raises(ConfigError, match=r"differ; over several pods .* use an engine.image that xpyd knows"):
        register()
    assert in_place() == [False] * 3


@pytest.mark.usefixtures("stock", "member")
def test_members_of_one_life_have_a_key_that_no_other_life_has(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    assert ExecutorWriter.settings.key == keys.of_life(SERVICE_KEY, LIFE) != keys.of_life(SERVICE_KEY, "cd" * 16)
    monkeypatch.delenv(launch.ENV_KEY_FILE)
    with pytest.raises(ConfigError, match=f"{launch.ENV_KEY_FILE} is not set"):
        register()


# --- what goes over it ---


def views(value: Any) -> list[memoryview]:
    return [memoryview(part).cast("B") for part in pickles.dumps(value)]


@pytest.mark.parametrize("tensor", [
    torch.arange(600_000, dtype=torch.float64).reshape(2, -1), torch.ones(1 << 20, dtype=torch.bfloat16), torch.ones(3),
    torch.empty(0), torch.tensor(4.0)], ids=["large", "bfloat16", "small", "empty", "scalar"])
def test_tensors_come_back_as_they_were_and_lie_in_memory_of_their_own(tensor: torch.Tensor) -> None:
    parts = views({"t": tensor})
    assert len(parts) == 1 + (tensor.nbytes >= pickles.BESIDE_LEAST)
    own = [memoryview(bytearray(part)) for part in parts]
    back = pickles.loads(own)["t"]
    for part in own:
        part[:] = bytes(len(part))
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)
    back.zero_()


def test_more_large_buffers_than_a_message_has_parts_go_into_the_pickle() -> None:
    one = np.zeros(pickles.BESIDE_LEAST, np.uint8)
    parts = pickles.dumps([pickle.PickleBuffer(one[:]) for _ in range(PARTS_MAX + 3)])
    assert len(parts) == PARTS_MAX
    assert len(pickles.loads([memoryview(part).cast("B") for part in parts])) == PARTS_MAX + 3


# --- strangers ---


def test_a_reader_takes_nothing_from_a_writer_that_does_not_hold_the_key(monkeypatch: pytest.MonkeyPatch,
                                                                         tmp_path: Path) -> None:
    """A stranger in the place of the executor, who has even the handle."""
    monkeypatch.setattr(queues, "WAIT_S", 1.5)
    mark = tmp_path / "ran"
    monkeypatch.setattr(ExecutorWriter, "settings", SETTINGS)
    real = ExecutorWriter(2, 1)
    known = wire.read_handle(real.export_handle().raw)
    context: zmq.Context[Any] = zmq.Context()
    try:
        for key in (None, ServiceKey(bytes(32))):
            sock = context.socket(zmq.ROUTER)
            if key is not None:
                curve.serve(sock, key, "broadcast")
            port = sock.bind_to_random_port("tcp://127.0.0.1")
            raw = wire.pack(msgspec.structs.replace(known, endpoint=f"tcp://127.0.0.1:{port}"))
            reader = ExecutorWriter.create_from_handle(msgspec.structs.replace(real.export_handle(), raw=raw), 1)
            with ThreadPoolExecutor() as pool:
                joining = pool.submit(reader.wait_until_ready)
                while not joining.done():
                    if sock.poll(50):
                        peer, *_ = sock.recv_multipart()
                        sock.send_multipart([peer, wire.pack(wire.QueueWelcome())])
                        sock.send_multipart([peer, wire.pack_number(1, 1), pickle.dumps(Bomb(mark))])
                assert isinstance(joining.exception(), PeerGone)
        assert not mark.exists()
    finally:
        context.destroy(linger=0)
        real.shutdown()


def test_a_handle_that_asks_a_reader_elsewhere_for_no_key_is_not_taken() -> None:
    raw = wire.pack(wire.Handle(wire.WIRE_VERSION, "executor", b"t" * 16, Layout(1), (), "", ("rank 1",),
                                "tcp://127.0.0.1:9", False, 1 << 20))
    with pytest.raises(AuthError, match="asks for no key"):
        ExecutorReader(queues.QueueHandle([], "tcp://127.0.0.1:9", raw), 1, SETTINGS)


# --- bounds and misuse ---


def pair(**options: Any) -> tuple[ExecutorWriter, ExecutorReader]:
    """A writer and its one reader, both of this process."""
    writer = ExecutorWriter(1, 1, max_chunk_bytes=4096, max_chunks=4, **options)
    reader = ExecutorWriter.create_from_handle(writer.export_handle(), 0)
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(reader.wait_until_ready)
        writer.wait_until_ready()
        joining.result()
    return writer, reader


def test_a_reader_that_is_too_far_behind_ends_the_wait_and_nothing_grows() -> None:
    writer, reader = pair()
    for number in range(4):
        writer.enqueue(number, timeout=0.5)
    with pytest.raises(TimeoutError, match="rank 0"):
        writer.enqueue(4, timeout=0.3)
    assert [reader.dequeue(1.0) for _ in range(4)] == [0, 1, 2, 3]
    writer.enqueue(5, timeout=0.5)
    assert reader.dequeue(1.0) == 5
    with pytest.raises(TimeoutError, match="nothing from"):
        reader.dequeue(0.1)
    writer.shutdown()
    reader.shutdown()


def test_a_message_beyond_the_bound_is_refused_and_the_next_goes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "MESSAGE_MAX", 100_000)
    writer, reader = pair()
    with pytest.raises(ValueError, match="allowed are 1 to 1024 parts and 100000 bytes"):
        writer.enqueue(bytes(200_000))
    writer.enqueue(bytes(50_000))
    assert len(reader.dequeue(1.0)) == 50_000
    writer.shutdown()
    reader.shutdown()


def test_who_waits_is_woken_by_shutdown_on_either_side() -> None:
    writer, reader = pair()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(reader.dequeue, None, indefinite=True)
        time.sleep(0.1)
        reader.shutdown()
        with pytest.raises(RuntimeError, match="cancelled"):
            waiting.result(60)
        for number in range(4):
            writer.enqueue(number)
        sending = pool.submit(writer.enqueue, 4)
        time.sleep(0.1)
        writer.shutdown()
        with pytest.raises(RuntimeError, match="cancelled"):
            sending.result(60)
    with pytest.raises(RuntimeError, match="cancelled"):
        writer.enqueue(5)


def test_readers_that_do_not_join_are_named_and_who_waits_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "WAIT_S", 0.0)
    writer = ExecutorWriter(2, 2)
    with pytest.raises(PeerGone, match="rank 0, rank 1: did not join the executor's queue"):
        writer.wait_until_ready()
    monkeypatch.setattr(queues, "WAIT_S", 60.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(writer.wait_until_ready)
        time.sleep(0.1)
        writer.shutdown()
        with pytest.raises(RuntimeError, match="cancelled"):
            waiting.result(60)


def test_a_queue_that_was_not_joined_is_not_read_and_groups_are_written_by_rank_0() -> None:
    writer = ExecutorWriter(1, 1)
    reader = ExecutorWriter.create_from_handle(writer.export_handle(), 0)
    with pytest.raises(OurFault, match="before it was joined"):
        reader.dequeue(0.1)
    with pytest.raises(OurFault, match="whose writer is rank 1"):
        ExecutorWriter.create_from_process_group(None, 4096, 4, writer_rank=1)
    writer.shutdown()


def test_readers_have_the_names_of_their_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExecutorWriter, "settings", SETTINGS)
    for args, local, remote in (((4, 2), [0, 1], ["rank 2", "rank 3"]), ((1, 0), [], ["rank 0"]),
                                ((3, 1, [2]), [2], ["rank 1", "rank 3"])):
        writer = ExecutorWriter(*args)
        handle = writer.export_handle()
        known = wire.read_handle(handle.raw)
        assert (handle.local_reader_ranks, list(known.remote)) == (local, remote)
        assert list(known.local) == [f"rank {rank}" for rank in local]
        assert (handle.remote_subscribe_addr or "").startswith("tcp://127.0.0.1:")
        writer.shutdown()
    assert pickle.loads(pickle.dumps(handle)) == handle


def test_without_a_key_nobody_elsewhere_can_be_asked_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExecutorWriter, "settings", QueueSettings(host="192.0.2.1"))
    with pytest.raises(ConfigError, match="needs the service's key"):
        ExecutorWriter(2, 1)


def test_what_is_not_used_any_more_is_closed() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        writer, reader = pair()
        writer.enqueue(1)
        assert reader.dequeue(1.0) == 1
        del writer, reader
    end = time.monotonic() + 60
    while (now := len(os.listdir("/proc/self/fd"))) > before + 2:  # threads that end close what was theirs
        assert time.monotonic() < end, (before, now)
        time.sleep(0.05)


def test_a_lost_worker_is_told_once_and_not_while_the_engine_ends_anyway() -> None:
    told: list[str] = []
    answers = SimpleNamespace(shutdown=lambda: told.append("cancelled"))
    one = SimpleNamespace(is_failed=False, shutting_down=False, response_mqs=[answers],
                          failure_callback=lambda: told.append("told"))
    patch.end_engine(one, "rank 1", "its process has ended")
    assert (told, one.is_failed, one.failure_callback) == (["cancelled", "told"], True, None)
    patch.end_engine(one, "rank 1", "again")
    patch.end_engine(SimpleNamespace(is_failed=False, shutting_down=True), "rank 1", "")
    patch.end_engine(None, "rank 1", "")
    assert told == ["cancelled", "told"]


def test_a_hash_changes_with_its_method_alone() -> None:
    found = sources.hashes(compat.shm_broadcast)
    assert found["MessageQueue.enqueue"] != found["MessageQueue.dequeue"]
    assert {"MessageQueue", "_reduce_tensor"} <= found.keys()
    assert sources.differing(compat.shm_broadcast, found | {"MessageQueue.enqueue": "", "no_more": ""}) == [
        "MessageQueue.enqueue", "no_more"]
