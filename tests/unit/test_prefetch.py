"""Reads in flight: order, errors, what is tried again, and how much is held."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from pathlib import Path

import google.auth.exceptions
import pytest
import requests
from google.api_core import exceptions

from shardline.components import vertex
from shardline.components.storage import Storage, ordered_map, storage
from shardline.components.vertex import with_retries


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def test_results_come_in_the_order_of_the_items_however_long_each_takes() -> None:
    later = threading.Event()

    def read(number: int) -> bytes:
        if number == 0:
            assert later.wait(10)
        if number == 5:
            later.set()
        return str(number).encode()

    assert list(ordered_map(read, range(100))) == [str(number).encode() for number in range(100)]


def test_an_error_is_in_the_position_of_its_item_and_ends_nothing() -> None:
    def read(number: int) -> bytes:
        if number == 1:
            raise FileNotFoundError(errno.ENOENT, "no such file")
        return b"x"

    first, second, third = ordered_map(read, range(3))
    assert (first, third) == (b"x", b"x")
    assert isinstance(second, FileNotFoundError)


def refused_token() -> Exception:
    error = google.auth.exceptions.RefreshError("no token")
    error.__cause__ = google.auth.exceptions.TransportError("no route")
    return error


@pytest.mark.parametrize(
    "error",
    [
        exceptions.TooManyRequests("later"),
        ConnectionResetError(),
        TimeoutError(),
        requests.ReadTimeout(),
        requests.ConnectionError(),
        google.auth.exceptions.TransportError("no route"),
        refused_token(),
        exceptions.ServiceUnavailable("later"),
    ],
)
def test_transient_errors_are_retried(error: Exception) -> None:
    left = [error, error]

    def read(item: str) -> str:
        if left:
            raise left.pop()
        return item

    assert with_retries(read, "there") == "there"


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "no"),
        ValueError(),
        requests.exceptions.InvalidURL("http:///x"),
        requests.exceptions.SSLError("certificate verify failed: self-signed certificate"),
        ConnectionError(
            "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"
        ),
        google.auth.exceptions.DefaultCredentialsError("none were found"),
        google.auth.exceptions.RefreshError("invalid_grant"),
        exceptions.Forbidden("no"),
        exceptions.Unauthorized("Anonymous caller does not have storage.objects.get access"),
    ],
    ids=repr,
)
def test_permanent_errors_are_raised_at_once(error: Exception) -> None:
    def read(item: str) -> str:
        raise error

    with pytest.raises(type(error)):
        with_retries(read, "there")


def test_an_error_that_never_ends_is_raised_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vertex, "READ_RETRY_S", 0.05)

    def read(item: str) -> str:
        raise ConnectionError("injected")

    with pytest.raises(ConnectionError, match="injected"):
        with_retries(read, "there")


def test_large_results_are_held_within_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "BUFFER_BYTES", 10_000)
    lock, held, most = threading.Lock(), 0, 0

    def read(number: int) -> bytes:
        nonlocal held, most
        with lock:
            held += 1
            most = max(most, held)
        return bytes(1000)

    for _ in ordered_map(read, range(300)):
        with lock:
            held -= 1
    assert most <= 20  # some are asked for before the size of any is known


def test_credentials_of_a_person_who_has_set_no_project_are_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 'gcloud auth application-default login' leaves."""
    person = {"type": "authorized_user", "client_id": "1", "client_secret": "2", "refresh_token": "3"}
    (tmp_path / "person.json").write_text(json.dumps(person))
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_CLOUD_PROJECT", "GCLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "person.json"))

    storage._client_of.cache_clear()
    assert Storage("gs://photos").author.endswith(socket.gethostname())
