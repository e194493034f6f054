"""The flags of a ring under every order of accesses that x86 allows, with deaths between any two of them.

The code of ``ring`` runs as it is; words and bytes are one simulated memory with store buffers (``tso``). A message is a
few words that are written and read one by one, so that a torn one would show.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tso import Memory, Process, Stalled

from xpyd_sidecar.broadcast.layout import MASK, Layout
from xpyd_sidecar.broadcast.ring import ReadSide, WriteSide

BODY = 3
"""Words of a message."""


class World:
    """A writer and readers; what each reader saw. ``fence`` and ``late_publish`` break the protocol on purpose."""

    def __init__(self, readers: int, chunks: int, messages: int, *, start: int = 1, fence: bool = True,
                 drop_dead: bool = True, flag_first: bool = False) -> None:
        self.layout = Layout(readers, chunks, 256)
        self.messages = messages
        self.start = start
        self.fence = fence
        self.drop_dead = drop_dead
        self.flag_first = flag_first
        self.memory = Memory(self.layout.words + chunks * BODY)
        self.seen: list[list[tuple[int, ...]]] = [[] for _ in range(readers)]
        self.refused = [False] * readers
        self.dead: set[int] = set()
        self.falsely: set[int] = set()
        if start != 1:  # as if everything before had been given back
            for number in range(start - chunks, start):
                chunk = self.layout.chunk(number)
                self.memory.words[self.layout.written_word(chunk)] = number & MASK
                for reader in range(readers):
                    self.memory.words[self.layout.read_word(chunk, reader)] = number & MASK
        self.writer = self.memory.process("writer", self.write)
        self.readers = [self.memory.process(f"reader {reader}", self.reading(reader)) for reader in range(readers)]

    def body(self, number: int) -> int:
        return self.layout.words + self.layout.chunk(number) * BODY

    def full(self, words: Process) -> Callable[[], None]:
        return words.fence if self.fence else lambda: None

    def write(self, words: Process) -> None:
        side = WriteSide(self.layout, words, full=self.full(words))
        side.number = self.start
        for number in range(self.start, self.start + self.messages):
            while (reader := side.blocking_reader()) is not None:
                if self.drop_dead and (reader in self.dead or reader in self.falsely):
                    words.wake(side.drop(reader))
                    continue
                word, value = side.await_reader(reader, number - self.layout.chunks)
                if value != (number - self.layout.chunks) & MASK and reader not in self.dead:
                    words.wait(word, value)
                side.awake()
            to_wake = side.publish() if self.flag_first else None
            for index in range(BODY):
                words[self.body(number) + index] = number
            if not self.flag_first:
                to_wake = side.publish()
            if to_wake is not None:
                words.wake(to_wake)
        words.wake(side.close())

    def reading(self, reader: int) -> Callable[[Process], None]:
        def read(words: Process) -> None:
            side = ReadSide(self.layout, reader, words, full=self.full(words))
            side.number = self.start
            side._at = self.layout.written_word(self.layout.chunk(self.start))
            for number in range(self.start, self.start + self.messages):
                while not side.ready():
                    word, value = side.park()
                    if not side.ready() and not side.dropped():
                        words.wait(word, value)
                    side.awake()
                    if side.dropped():
                        self.refused[reader] = True
                        return
                got = tuple(words[self.body(number) + index] for index in range(BODY))
                if side.dropped():
                    self.refused[reader] = True
                    return
                self.seen[reader].append(got)
                sleeper = side.give_back()
                if sleeper is not None:
                    words.wake(sleeper)
        return read

    def died(self, process: Process) -> None:
        """The link breaks, and a writer that sleeps looks after it with its next slice."""
        self.dead.add(self.readers.index(process))
        self.writer.asleep = None

    def check(self) -> None:
        """Everything that a reader saw is the next message, whole; those who live and were not dropped saw all."""
        for reader, seen in enumerate(self.seen):
            assert seen == [(number,) * BODY for number in range(self.start, self.start + len(seen))]
            if reader not in self.dead and not self.refused[reader]:
                assert len(seen) == self.messages


def run(world: World, choose: Callable[[int], int], deaths: int = 0) -> None:
    try:
        world.memory.run(choose, mortal=world.readers, deaths=deaths, on_death=world.died)
        world.check()
    finally:
        world.memory.end()


def picker(seed: int) -> Callable[[int], int]:
    return random.Random(seed).randrange


def drawn(data: st.DataObject, seed: int) -> Callable[[int], int]:
    """The first choices are hypothesis's own, so that it can shrink them; the rest follow from the seed."""
    first = data.draw(st.lists(st.integers(0, 255), max_size=60))
    rest = random.Random(seed)
    return lambda below: (first.pop() if first else rest.randrange(1 << 16)) % below


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 3))
def test_nothing_is_lost_torn_or_reordered_and_nobody_sleeps_for_ever(data: st.DataObject, seed: int, readers: int,
                                                                      chunks: int) -> None:
    run(World(readers, chunks, messages=6), drawn(data, seed))


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(0, 2**32), st.integers(1, 3))
def test_readers_may_die_between_any_two_accesses(data: st.DataObject, seed: int, readers: int) -> None:
    run(World(readers, 2, messages=6), drawn(data, seed), deaths=readers)


@pytest.mark.parametrize("seed", range(40))
def test_a_living_reader_that_is_dropped_never_takes_torn_bytes_for_a_message(seed: int) -> None:
    world = World(2, 2, messages=8)
    world.falsely.add(1)
    run(world, picker(seed))
    assert len(world.seen[0]) == 8


@pytest.mark.parametrize("seed", range(10))
def test_the_numbers_may_pass_the_largest_word(seed: int) -> None:
    run(World(2, 3, messages=7, start=(1 << 32) - 3), picker(seed))


def test_the_writer_may_die_anywhere_and_what_was_published_stays_whole() -> None:
    cut = 0
    for seed in range(60):
        world = World(2, 2, messages=6)
        memory, rng = world.memory, random.Random(seed)
        for _ in range(rng.randrange(5, 200)):
            awake = [process for process in memory.processes if process.alive and process.asleep is None]
            if not awake or not world.writer.alive:
                break
            rng.choice(awake).step()
        if world.writer.alive:
            cut += 1
            world.writer.kill()
        world.writer.drain()
        for reader in world.readers:  # each reads what is there, and then sleeps or ends
            reader.asleep = None
            for _ in range(2000):
                if not reader.alive or reader.asleep is not None:
                    break
                reader.step()
        for seen in world.seen:
            assert seen == [(number,) * BODY for number in range(1, 1 + len(seen))]
        memory.end()
    assert cut > 20


def violations(make: Callable[[], World], seeds: int, deaths: int = 0) -> int:
    found = 0
    for seed in range(seeds):
        try:
            run(make(), picker(seed), deaths)
        except (AssertionError, Stalled):
            found += 1
    return found


def test_the_model_finds_a_flag_that_is_stored_before_the_bytes() -> None:
    assert violations(lambda: World(1, 2, messages=4, flag_first=True), 30) > 0


def test_the_model_finds_the_wake_up_that_is_lost_without_the_fences() -> None:
    assert violations(lambda: World(1, 2, messages=6, fence=False), 400) > 0


def test_the_model_finds_a_dead_reader_that_is_waited_for() -> None:
    world = World(1, 2, messages=6, drop_dead=False)
    world.readers[0].kill()
    world.died(world.readers[0])
    try:
        with pytest.raises(AssertionError, match="no end after"):
            world.memory.run(picker(1), steps=2000)
    finally:
        world.memory.end()
