from xpyd_sidecar.dp.watch import PeerWatch


def test_a_peer_that_is_silent_for_longer_than_the_timeout_is_named() -> None:
    watch = PeerWatch((0, 1), 0.0, 5.0)
    for now in range(1, 6):
        watch.on_frame(0, float(now))
        assert watch.silent(float(now)) is None
    watch.on_frame(0, 5.5)
    assert watch.silent(5.5) == (1, 5.5)


def test_time_in_which_this_process_stood_still_counts_as_a_second() -> None:
    watch = PeerWatch((1,), 0.0, 5.0)
    assert watch.silent(100.0) is None
    found = [now for now in range(101, 110) if watch.silent(float(now))]
    assert found[0] == 105
