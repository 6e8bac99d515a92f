"""The fake's doors: gRPC with TLS, REST, and a proxy through which clients find both under the real names."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import ssl
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import grpc
from google.protobuf import json_format
from google.rpc import code_pb2

from tests.contract.fake.certificates import Certificates
from tests.contract.fake.rpcs import Rpc
from tests.contract.fake.services import ApiError, FakeServices

_HTTP_STATUS = {
    code_pb2.INVALID_ARGUMENT: 400,
    code_pb2.PERMISSION_DENIED: 403,
    code_pb2.NOT_FOUND: 404,
    code_pb2.UNIMPLEMENTED: 501,
    code_pb2.UNAVAILABLE: 503,
}
_GRPC_STATUS = {status.value[0]: status for status in grpc.StatusCode}


@contextlib.contextmanager
def serve_grpc(services: FakeServices, rpcs: Mapping[str, Rpc], files: Certificates) -> Iterator[int]:
    """Serves gRPC with TLS on a port of this machine and gives the port."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            rpc = rpcs.get(details.method)
            if rpc is None:
                return None

            def answer(request: Any, context: grpc.ServicerContext) -> Any:
                try:
                    return services.call(rpc.method, request)
                except ApiError as error:
                    context.abort(_GRPC_STATUS[error.code], str(error))

            return grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=rpc.request.deserialize,
                response_serializer=rpc.response.serialize,
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
    """Serves the same calls as JSON over HTTP, and tokens under /token, and gives the port.

    With certificates it is HTTPS.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._handle()

        def do_POST(self) -> None:
            self._handle()

        def _handle(self) -> None:
            url = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if url.path == "/token":
                self._answer(200, {"access_token": "fake", "expires_in": 3600, "token_type": "Bearer"})
                return
            try:
                self._answer(200, self._call(unquote(url.path), url.query, body))
            except ApiError as error:
                status = _HTTP_STATUS[error.code]
                name = code_pb2.Code.Name(error.code)
                self._answer(status, {"error": {"code": status, "status": name, "message": str(error)}})

        def _call(self, path: str, query: str, body: bytes) -> Any:
            for rpc in rpcs.values():
                for route in rpc.routes:
                    match = route.path.fullmatch(path) if route.verb == self.command else None
                    if match:
                        request = _request(match.groupdict(), route.body, query, body)
                        message = rpc.request.from_json(json.dumps(request))
                        return _json(rpc, services.call(rpc.method, message))
            raise ApiError(code_pb2.NOT_FOUND, f"no route {self.command} {path}")

        def _answer(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files.certificate, files.key)
        # The handshake is left to the thread of the connection.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with _running(server) as port:
        yield port


def _json(rpc: Rpc, response: Any) -> Any:
    """Returns a response, proto-plus or plain protobuf (google.longrunning), as JSON."""
    if hasattr(rpc.response, "to_json"):
        return json.loads(rpc.response.to_json(response))
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


@contextlib.contextmanager
def serve_proxy(hosts: Collection[str], grpc_port: int, https_port: int) -> Iterator[tuple[int, list[str]]]:
    """Serves HTTP CONNECT for these hosts, at two ports of this machine, and for nobody else.

    Gives the proxy's port and the list of the hosts that it has refused.
    """
    refused: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            request = self.rfile.readline().decode("ascii", "replace").split()
            while self.rfile.readline().strip():
                pass
            host = request[1].rpartition(":")[0] if len(request) > 1 else ""
            if request[:1] != ["CONNECT"] or host not in hosts:
                refused.append(" ".join(request[:2]))
                self.wfile.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
                return
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            # One host speaks both; the first message of TLS (ALPN) says which of them a client wants.
            hello = self.connection.recv(1 << 14, socket.MSG_PEEK)
            port = https_port if b"http/1.1" in hello else grpc_port
            with socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=_pump, args=(server, self.connection), daemon=True)
                back.start()
                _pump(self.connection, server)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with _running(Server(("127.0.0.1", 0), Handler)) as port:
        yield port, refused


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _running(server: socketserver.TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
