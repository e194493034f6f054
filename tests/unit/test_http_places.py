"""Who has a place for a connection, and who gives way."""

from __future__ import annotations

import random

import pytest

from xpyd_sidecar.router.http.places import GRACE_S, LEAST, ConnectionPlaces, source_of


class One:
    def __init__(self, name: str = "") -> None:
        self.name = name

    def give_way(self) -> None:
        raise AssertionError("who calls this is the server")


PEER = ("192.0.2.7", 4711)
ENTERED, REFUSED = (True, None), (False, None)


def test_the_oldest_without_a_request_gives_way_first_and_then_who_was_idle_for_longest() -> None:
    places = ConnectionPlaces(64)
    busy, early, late, fresh, newest = (One(name) for name in ("busy", "early", "late", "fresh", "newest"))
    for number, one in enumerate((busy, early, late, fresh)):
        assert places.enter(one, PEER, float(number)) == ENTERED
    for one in (busy, early, late):
        assert places.claim(one, "")
    places.rest(late, 5.0)
    places.rest(early, 6.0)
    places.wake(late)
    places.rest(late, 7.0)
    assert places.enter(newest, PEER, 9.5) == ENTERED
    assert places.dispensable(10.0) is fresh
    places.leave(fresh)
    assert places.dispensable(10.0) is early, "the newest came less than a second ago"
    assert places.dispensable(9.5 + GRACE_S) is newest
    places.rest(early, 11.0)
    assert places.dispensable(11.0) is newest
    places.leave(newest)
    assert places.dispensable(11.0) is early, "it has not been asked since"
    places.leave(early)
    assert places.dispensable(11.0) is late
    places.wake(late)
    assert places.dispensable(11.0) is None, "who is busy never gives way"
    assert len(places) == 2


def test_of_one_address_few_connections_may_be_without_a_request() -> None:
    places = ConnectionPlaces(LEAST * 8, ("10.0.0.0/8", "fd00::/8"))
    mine = [One() for _ in range(LEAST)]
    assert all(places.enter(one, PEER, 0.0) == ENTERED for one in mine)
    assert places.enter(One(), PEER, 0.0) == REFUSED
    assert places.enter(One(), ("192.0.2.8", 1), 0.0) == ENTERED
    assert places.claim(mine[0], "")
    assert places.enter(One(), PEER, 0.5) == ENTERED, "one of them has brought a request"
    places.leave(mine[1])
    assert places.enter(One(), PEER, 0.5) == ENTERED, "one of them is gone"
    assert places.enter(One(), PEER, 0.5) == REFUSED
    for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1", "10.9.8.7", "fd00::1"):
        assert all(places.enter(One(), (host, 1), 0.0) == ENTERED for _ in range(2 * LEAST)), host
    for peer in ("", None):  # a socket of this host has a path, or nothing
        assert all(places.enter(One(), peer, 0.0) == ENTERED for _ in range(2 * LEAST)), peer


def test_who_shares_an_address_with_strangers_has_a_place_a_second_later_and_the_oldest_of_them_gives_way() -> None:
    places = ConnectionPlaces(LEAST * 8)
    early, served, *others = (One(str(number)) for number in range(LEAST))
    for number, one in enumerate((early, served, *others)):
        assert places.enter(one, PEER, number / 100) == ENTERED
    assert places.claim(served, "")
    assert places.enter(last := One(), PEER, 0.9) == ENTERED
    assert places.enter(One(), PEER, 0.95) == REFUSED
    assert places.enter(One(), PEER, GRACE_S) == (True, early)
    assert places.enter(One(), PEER, GRACE_S) == REFUSED, "the next one came later"
    for one in others:
        assert places.enter(One(), PEER, 2.0) == (True, one), "who is served stays"
    assert places.enter(One(), PEER, 2.0) == (True, last)
    assert places.enter(One(), PEER, 2.0)[0]
    assert places.enter(One(), PEER, 2.0) == REFUSED
    assert len(places) == LEAST + 1


@pytest.mark.parametrize(("host", "source"), [
    ("192.0.2.7", "192.0.2.7"), ("::ffff:192.0.2.7", "192.0.2.7"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
    ("2001:db8:1:2:ffff::9", "2001:db8:1:2::/64"), ("fe80::1%eth0", "fe80::/64"), ("127.9.9.9", ""), ("a name", "")])
def test_a_customers_network_of_ipv6_is_one_source(host: str, source: str) -> None:
    assert source_of(host, ()) == source


def test_a_key_has_half_of_the_places_and_one_that_changes_its_key_counts_for_the_new_one() -> None:
    places = ConnectionPlaces(2 * LEAST)
    mine = [One() for _ in range(LEAST + 1)]
    for one in mine:
        places.enter(one, ("127.0.0.1", 1), 0.0)
    assert all(places.claim(one, "a") for one in mine[:-1])
    assert not places.claim(mine[-1], "a")
    assert places.dispensable(GRACE_S) is mine[-1], "it stays without a request"
    assert places.claim(mine[0], "a"), "who is counted stays"
    assert places.claim(mine[0], "b")
    assert places.claim(mine[-1], "a")
    assert places.per_key == LEAST
    with pytest.raises(ValueError, match="does not appear"):
        ConnectionPlaces(8, ("everybody",))


def test_nothing_is_kept_of_connections_that_are_gone() -> None:
    draw, places = random.Random(7), ConnectionPlaces(40)
    there: list[One] = []
    evicted = 0
    for now in range(4000):
        deed = draw.choice(("enter", "enter", "claim", "rest", "wake", "leave", "again"))
        if deed == "enter":
            one = One()
            entered, oldest = places.enter(one, (f"192.0.2.{draw.randrange(3)}", 1), now / 9)
            if entered:
                there.append(one)
            if oldest is not None:
                there.remove(oldest)
                evicted += 1
        elif there:
            one = draw.choice(there)
            if deed == "claim":
                places.claim(one, draw.choice(("", "a", "b")))
            elif deed == "rest":
                places.rest(one, float(now))
            elif deed == "wake":
                places.wake(one)
            else:
                there.remove(one)
                places.leave(one)
                places.leave(one)
                places.rest(one, float(now))
        assert len(places) == len(there)
        found = places.dispensable(float(now))
        assert found is None or found in there
    assert evicted > 20
    for one in there:
        places.leave(one)
    assert (len(places), places._fresh, places._idle, places._sources, places._keys) == (0, {}, {}, {}, {})
