"""A provider for a real Terraform, made of terraform_schema.json: it creates nothing, and reaches no one.

Terraform then validates, plans and applies a module itself: expressions, types, for_each, conditions of
variables. What Google's provider checks besides, and the platform, stays unchecked.

It speaks tfplugin5 with messages put together by hand, as neither its protobuf nor MessagePack is a
dependency: https://developer.hashicorp.com/terraform/plugin/terraform-plugin-protocol. Terraform finds it by
TF_REATTACH_PROVIDERS, and so needs no registry:
https://developer.hashicorp.com/terraform/plugin/debugging#starting-a-provider-in-debug-mode.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from tests.helpers.terraform import SCHEMA

_SERVICE = "/tfplugin5.Provider/"
_LIST, _ONE = 2, 1
#: MessagePack's null, and Terraform's value that is known after apply.
_NULL, _UNKNOWN = b"\xc0", b"\xd4\x00\x00"
#: Attributes that the platform makes up, by what they are made of.
_MADE: Mapping[str, Mapping[str, str]] = {
    "google_service_account": {
        "email": "{account_id}@acme-vision.iam.gserviceaccount.com",
        "member": "serviceAccount:{account_id}@acme-vision.iam.gserviceaccount.com",
        "name": "projects/acme-vision/serviceAccounts/{account_id}@acme-vision.iam.gserviceaccount.com",
    },
    "google_pubsub_topic": {"id": "projects/acme-vision/topics/{name}"},
    "google_secret_manager_secret": {"id": "projects/acme-vision/secrets/{secret_id}"},
}


@contextmanager
def google_provider() -> Iterator[dict[str, str]]:
    """Serves the provider; yields the variables by which terraform and tofu find it."""
    with ThreadPoolExecutor(16) as threads:
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((_Handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        reattach = {
            "Protocol": "grpc",
            "ProtocolVersion": 5,
            "Pid": os.getpid(),
            "Test": True,
            "Addr": {"Network": "tcp", "String": f"127.0.0.1:{port}"},
        }
        hosts = ("registry.terraform.io", "registry.opentofu.org")
        names = {f"{host}/hashicorp/google": reattach for host in hosts}
        try:
            yield {"TF_REATTACH_PROVIDERS": json.dumps(names), "CHECKPOINT_DISABLE": "1"}
        finally:
            server.stop(None).wait()


class _Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The methods that Terraform calls for a new state."""

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        methods: dict[str, Callable[[bytes], bytes]] = {
            "GetSchema": lambda request: _schemas(),
            "PrepareProviderConfig": lambda request: _field(1, _read(request)[1]),
            "ValidateResourceTypeConfig": lambda request: b"",
            "Configure": lambda request: b"",
            "PlanResourceChange": _plan,
            "ApplyResourceChange": _apply,
            "Stop": lambda request: b"",
        }
        method = methods.get(call.method.removeprefix(_SERVICE))
        if method is None:
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, context: method(request))


def _plan(request: bytes) -> bytes:
    """Plans a new resource: what it exports is known after apply."""
    fields = _read(request)
    state = _read(fields[3])[1]
    for name in _exported(fields[1].decode()):
        state = state.replace(_text(name) + _NULL, _text(name) + _UNKNOWN)
    return _field(1, _field(1, state))


def _apply(request: bytes) -> bytes:
    """Returns the planned state with what the platform makes up."""
    fields = _read(request)
    kind, state = fields[1].decode(), _read(fields[3])[1]
    for name in _exported(kind):
        made = _MADE.get(kind, {}).get(name, f"{name}-of-{kind}")
        made = made.format_map({key: _value(state, key) for key in ("account_id", "name", "secret_id")})
        state = state.replace(_text(name) + _UNKNOWN, _text(name) + _text(made))
    return _field(1, _field(1, state))


def _exported(kind: str) -> list[str]:
    return [name for name in SCHEMA[kind]["attributes"] if name not in SCHEMA[kind]["arguments"]]


def _schemas() -> bytes:
    """Returns GetProviderSchema.Response."""
    provider = _block({"project": "string", "region": "string"})
    found = _field(1, _field(2, provider))
    for kind, schema in SCHEMA.items():
        block = _block(schema["arguments"], _exported(kind))
        found += _field(2, _field(1, kind.encode()) + _field(2, _field(2, block)))
    return found


def _block(arguments: Mapping[str, Any], exported: list[str] | None = None) -> bytes:
    """Returns a Schema.Block."""
    found = b""
    for name, kind in arguments.items():
        required = (kind if isinstance(kind, str) else kind[0]).endswith(" required")
        if isinstance(kind, str):
            of = kind.removesuffix(" required")
            wanted: Any = ["list", of.removeprefix("list of ")] if of.startswith("list of ") else of
            typed = json.dumps(["map", "string"] if of == "map" else wanted).encode()
            flag = _number(4 if required else 5, 1)
            found += _field(2, _field(1, name.encode()) + _field(2, typed) + flag)
        else:
            nested = _field(1, name.encode()) + _field(2, _block(kind[1])) + _number(3, _LIST)
            nested += _number(4, _ONE) if required else b""
            found += _field(3, nested + (_number(5, _ONE) if kind[0].startswith("one") else b""))
    for name in exported or ():
        found += _field(2, _field(1, name.encode()) + _field(2, b'"string"') + _number(6, 1))
    return found


def _number(tag: int, value: int) -> bytes:
    """Returns a field of protobuf, a number."""
    return _varint(tag << 3) + _varint(value)


def _field(tag: int, value: bytes) -> bytes:
    """Returns a field of protobuf, a text or a message."""
    return _varint(tag << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _read(message: bytes) -> dict[int, bytes]:
    """Returns the texts and messages of a message of protobuf, by tag."""
    found, at = {}, 0
    while at < len(message):
        key, at = _read_varint(message, at)
        size, at = _read_varint(message, at)
        if key & 7 == 2:
            found[key >> 3] = message[at : at + size]
            at += size
    return found


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _text(text: str) -> bytes:
    """Returns a text of MessagePack."""
    encoded = text.encode()
    return (bytes([0xA0 | len(encoded)]) if len(encoded) < 32 else bytes([0xD9, len(encoded)])) + encoded


def _value(state: bytes, name: str) -> str:
    """Returns the text of an argument in a state, "" without one."""
    _, _, rest = state.partition(_text(name))
    if rest[:1] == b"\xd9":
        return rest[2 : 2 + rest[1]].decode()
    return rest[1 : 1 + (rest[0] & 31)].decode() if rest and rest[0] >> 5 == 5 else ""
