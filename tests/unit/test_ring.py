"""Sums over a ring of sockets, each process played by a thread."""

import socket
import threading
import time

import numpy as np
import pytest

from shardline.trainer.distribute import ring
from shardline.trainer.distribute.ring import LostPeerError, Ring


def connections(size):
    """Returns, for every process of a ring, its connections to the next and from the previous one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        outgoing, incoming = [], []
        for _ in range(size):
            outgoing.append(socket.create_connection(server.getsockname()))
            incoming.append(server.accept()[0])
    return [(outgoing[rank], incoming[rank - 1]) for rank in range(size)]


def together(size, work, **options):
    """Runs work(ring, rank) at every place at once and returns what came out, or the error, by rank."""
    results = [None] * size

    def run(rank, pair):
        place = Ring(rank, size, *pair, **options)
        try:
            results[rank] = work(place, rank)
        except LostPeerError as error:
            results[rank] = error
        finally:
            place.close()

    threads = [threading.Thread(target=run, args=item) for item in enumerate(connections(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def values(rank, count):
    return np.random.default_rng(rank).normal(size=count).astype(np.float32)


# Nothing; less than there are places; one part not whole; more than the kernel takes at once.
@pytest.mark.parametrize("count", [0, 1, 100, 3_000_001])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_processes_get_the_same_sum(size, count):
    def work(place, rank):
        own = values(rank, count)
        place.sum(own)
        return own

    found = together(size, work)
    expected = sum(values(rank, count).astype(np.float64) for rank in range(size))
    for own in found:
        np.testing.assert_allclose(own, expected, atol=1e-5)
        np.testing.assert_array_equal(own, found[0])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_rows_of_all_processes_are_joined_whatever_their_number(size):
    """Also between two sums, and of types that no sum has; the first process has no rows."""

    def own(rank):
        rows = 50_000 * rank if rank == 1 else rank
        return [np.full((rows, 3), rank, np.float16), np.arange(rows), np.full((1, 2), rank)]

    def work(place, rank):
        found = []
        for _ in range(2):
            place.sum(values(rank, 10))
            found.append(place.gather(*own(rank)))
        return found

    expected = [np.concatenate(arrays) for arrays in zip(*map(own, range(size)), strict=True)]
    for calls in together(size, work):
        for found in calls:
            for array, wanted in zip(found, expected, strict=True):
                assert array.dtype == wanted.dtype
                np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("size", [2, 3])
def test_numbers_are_sent_without_a_copy(size):
    """Arrays within a part, over the border of two, and at the end; around them what `values` has."""
    count, cuts = 300_000, [(5, 70_000), (90_000, 160_007), (200_000, 300_000)]

    def work(place, rank):
        whole, apart = values(rank, count), values(rank, count)
        for begin, end in cuts:
            apart[begin:end] = np.nan
        place.sum(apart, [(begin, whole[begin:end].copy()) for begin, end in cuts])
        place.sum(whole)
        return apart, whole

    found = together(size, work)
    for apart, whole in found:
        np.testing.assert_array_equal(apart, whole)
        np.testing.assert_array_equal(apart, found[0][0])


def test_values_that_are_not_finite_cause_no_warning():
    def work(place, rank):
        own = np.array([np.inf, np.nan, 1, np.inf], np.float32) * (1 - 2 * rank)
        place.sum(own)
        return own

    for own in together(2, work):
        np.testing.assert_array_equal(own, np.array([np.nan, np.nan, 0, np.nan], np.float32))


def test_a_neighbour_that_ends_is_noticed():
    def work(place, rank):
        if rank == 1:
            return None
        place.sum(values(rank, 1_000_000))
        return "done"

    first, _, third = together(3, work)
    assert isinstance(first, LostPeerError)
    assert isinstance(third, LostPeerError)
    assert "replica is gone" in str(third)


def test_processes_at_different_calls_do_not_mix_their_numbers():
    found = together(2, lambda place, rank: place.sum(values(rank, 100 + rank)))
    assert all("out of step" in str(error) for error in found)


def test_peers_are_checked_during_a_long_silence(monkeypatch):
    monkeypatch.setattr(ring, "_SILENCE_S", 0.01)
    asked, looks, start = threading.Event(), [], time.monotonic()

    def check(began):
        looks.append((began, time.monotonic()))
        if len(looks) == 3:
            asked.set()

    def work(place, rank):
        if rank == 1:
            asked.wait(10)
        own = np.ones(3, np.float32)
        place.sum(own)
        return own.tolist()

    assert together(2, work, check=check) == [[2.0] * 3] * 2
    began = {began for began, _ in looks[:3]}
    assert len(began) == 1  # one wait, of which each look knows the beginning
    assert start <= began.pop() <= looks[0][1] - 0.01


def test_a_peer_that_does_not_answer_ends_the_wait(monkeypatch):
    monkeypatch.setattr(ring, "_SILENCE_S", 0.01)
    ended = threading.Event()

    def check(began):
        raise LostPeerError("no answer")

    def work(place, rank):
        if rank == 1:
            return ended.wait(10)
        try:
            place.sum(np.ones(3, np.float32))
        finally:
            ended.set()
        return None

    silent, _ = together(2, work, check=check)
    assert str(silent) == "no answer"
