"""The fake's doors: gRPC with TLS, and REST."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

import grpc
from google.protobuf import any_pb2, json_format
from google.rpc import code_pb2, status_pb2
from grpc_status import rpc_status

from tests.contract.fake.api import ApiError
from tests.contract.fake.certificates import Certificates
from tests.contract.fake.failures import DroppedConnection
from tests.contract.fake.rpcs import Rpc
from tests.contract.fake.services import FakeServices
from tests.contract.fake.web import WebRequest, matched
from tests.helpers.serving import QuietHandler, serve

_HTTP_STATUS = {
    code_pb2.INVALID_ARGUMENT: 400,
    code_pb2.FAILED_PRECONDITION: 400,
    code_pb2.UNAUTHENTICATED: 401,
    code_pb2.PERMISSION_DENIED: 403,
    code_pb2.NOT_FOUND: 404,
    code_pb2.ALREADY_EXISTS: 409,
    code_pb2.ABORTED: 409,
    code_pb2.RESOURCE_EXHAUSTED: 429,
    code_pb2.INTERNAL: 500,
    code_pb2.UNIMPLEMENTED: 501,
    code_pb2.UNAVAILABLE: 503,
    code_pb2.DEADLINE_EXCEEDED: 504,
}


@contextlib.contextmanager
def serve_grpc(
    services: FakeServices, rpcs: Mapping[str, Rpc], files: Certificates, cut: Callable[[], None]
) -> Iterator[int]:
    """Serves gRPC with TLS on a port of this machine and gives the port; `cut` breaks its connections."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            rpc = rpcs.get(details.method)
            if rpc is None:
                return None

            def answer(request: Any, context: grpc.ServicerContext) -> Any:
                headers = {item.key: item.value for item in context.invocation_metadata()}
                try:
                    return services.call(rpc.method, request, headers.get("authorization", ""))
                except ApiError as error:
                    context.abort_with_status(rpc_status.to_status(_status(error)))
                except DroppedConnection:
                    cut()
                    context.abort(grpc.StatusCode.UNAVAILABLE, "nobody reads this")

            return grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=rpc.request.deserialize,
                # Plain protobuf (google.longrunning, Empty) serializes itself.
                response_serializer=getattr(rpc.response, "serialize", None)
                or rpc.response.SerializeToString,
            )

    server = grpc.server(ThreadPoolExecutor(8), handlers=(Handler(),))
    pair = files.key.read_bytes(), files.certificate.read_bytes()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def serve_rest(
    services: FakeServices, rpcs: Mapping[str, Rpc], files: Certificates | None = None
) -> Iterator[int]:
    """Serves the same calls as JSON over HTTP, others that are only there, and tokens; gives the port.

    With certificates it is HTTPS.
    """

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if url.path == "/token":
                self._body()
                self._answer(200, services.tokens.give())
                return
            try:
                self._answer(200, self._call(url.path, url.query))
            except ApiError as error:
                status = _HTTP_STATUS[error.code]
                self._answer(status, {"error": _as_json(error, status)})
            except DroppedConnection as drop:
                self._drop(drop)

        do_POST = do_PATCH = do_PUT = do_DELETE = do_GET

        def _call(self, path: str, query: str) -> Any:
            token = self.headers.get("Authorization", "")
            host = self.headers.get("Host", "").partition(":")[0]
            if found := matched(services.web_routes, self.command, host, path):
                route, fields = found
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self._body(route.method)
                request = WebRequest(host, fields, parse_qs(query), headers, body)
                return services.call(route.method, request, token)
            for rpc in rpcs.values():
                for rest in rpc.routes:
                    match = rest.path.fullmatch(unquote(path)) if rest.verb == self.command else None
                    if match:
                        body = self._body(rpc.method)
                        request = _request(match.groupdict(), rest.body, query, body)
                        message = rpc.request.from_json(json.dumps(request))
                        return _json(rpc, services.call(rpc.method, message, token))
            self._body()
            raise ApiError(code_pb2.NOT_FOUND, f"no route {self.command} {host} {path}")

        def _body(self, method: str = "") -> bytes:
            """Reads the body; only its beginning where the connection is to be lost meanwhile."""
            length = int(self.headers.get("Content-Length", 0))
            if not services.failures.drops_request(method):
                return self.rfile.read(length)
            return self.rfile.read(min(length, 16))

        def _answer(self, status: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _drop(self, drop: DroppedConnection) -> None:
            """Ends the connection without an answer, or after the beginning of one."""
            if drop.answered:
                self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"name": ')
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    with serve(Handler, files) as port:
        yield port


def _status(error: ApiError) -> status_pb2.Status:
    details = []
    for message in error.details:
        details.append(any_pb2.Any())
        details[-1].Pack(message)
    return status_pb2.Status(code=error.code, message=str(error), details=details)


def _as_json(error: ApiError, status: int) -> dict[str, Any]:
    content = json_format.MessageToDict(_status(error))
    return {**content, "code": status, "status": code_pb2.Code.Name(error.code)}


def _json(rpc: Rpc, response: Any) -> Any:
    """Returns a response, proto-plus or plain protobuf (google.longrunning), as JSON."""
    if hasattr(rpc.response, "to_json"):
        return json.loads(rpc.response.to_json(response, use_integers_for_enums=False))
    return json_format.MessageToDict(response)


def _request(groups: Mapping[str, str], body_field: str, query: str, body: bytes) -> dict[str, Any]:
    content = json.loads(body) if body else {}
    request = content if body_field == "*" else {body_field: content} if body_field else {}
    # "$alt" and its like are the protocol's, not the request's.
    fields = [(key, value) for key, value in parse_qsl(query) if not key.startswith("$")]
    for key, value in (*fields, *((key.replace("__", "."), value) for key, value in groups.items())):
        node = request
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return request
