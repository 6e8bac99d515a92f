"""BigQuery on ports of this machine, as Google's unmodified clients find it: tables, queries, read sessions.

It knows no SQL: what a query gives, a test says. Tables have versions, each from some time on.
"""

from __future__ import annotations

import contextlib
import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pyarrow as pa
from google.cloud.bigquery_storage_v1 import types

from tests.contract.fake.certificates import HOSTS, Certificates, certificates, write_service_account
from tests.contract.fake.proxy import Tunnels, serve_proxy
from tests.helpers.serving import QuietHandler, serve

PROJECT = "acme-vision"
_READ = "/google.cloud.bigquery.storage.v1.BigQueryRead/"
_COMPARED = {"=": operator.eq, ">": operator.gt, "<": operator.lt}
_WORDS = {"int64": "INTEGER", "double": "FLOAT", "string": "STRING", "binary": "BYTES", "bool": "BOOLEAN"}


def at(text: str) -> datetime:
    """Returns a time of day on which the tests' tables change."""
    return datetime.fromisoformat(f"2026-11-20T{text}:00").replace(tzinfo=UTC)


class RefusalError(Exception):
    """An answer that is an error: gRPC's code and HTTP's status for it, and what it says."""

    def __init__(self, code: grpc.StatusCode, status: int, said: str) -> None:
        super().__init__(said)
        self.code, self.status = code, status


def missing(said: str) -> RefusalError:
    """Returns the answer for what is not there."""
    return RefusalError(grpc.StatusCode.NOT_FOUND, 404, said)


def invalid(said: str) -> RefusalError:
    """Returns the answer to a request that cannot be fulfilled."""
    return RefusalError(grpc.StatusCode.INVALID_ARGUMENT, 400, said)


@dataclass
class FakeTable:
    """A table: its rows from each time on, the oldest first, and its kind."""

    versions: list[tuple[datetime, pa.Table]]
    kind: str = "TABLE"

    def rows(self, snapshot: datetime | None) -> pa.Table:
        """Returns the rows as of a time; now where it is none."""
        known = [rows for since, rows in self.versions if snapshot is None or since <= snapshot]
        if not known:
            raise invalid(f"Invalid snapshot time {snapshot}: it is before the earliest one, 168 hours ago")
        return known[-1]


@dataclass
class FakeBigQuery:
    """What the fake knows, and what was asked of it.

    Attributes:
        tables: Tables by "project.dataset.table".
        answer: What a query gives, and the tables that it reads; raises what it is refused with.
        calls: Names of the calls with what matters of them, in order.
        failures: Errors by call, each raised once; "ReadRows" raises its after the first message of a call.
        message_rows: Rows of a message.
    """

    tables: dict[str, FakeTable] = field(default_factory=dict)
    answer: Callable[[str], tuple[pa.Table, list[str]]] = lambda query: _no_query(query)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    failures: dict[str, list[RefusalError]] = field(default_factory=dict)
    message_rows: int = 2
    _sessions: list[pa.Table] = field(default_factory=list)
    _results: list[pa.Table] = field(default_factory=list)

    def called(self, name: str) -> list[Any]:
        """Returns what mattered of all calls of a name."""
        return [details for call, details in self.calls if call == name]

    def fail(self, call: str) -> None:
        """Raises the next failure of a call, if there is one."""
        if self.failures.get(call):
            raise self.failures[call].pop(0)

    def table(self, name: str) -> FakeTable:
        """Returns a table; there may be none."""
        if name not in self.tables:
            raise missing(f"Not found: Table {name.replace('.', ':', 1)}")
        return self.tables[name]

    def create_session(self, request: Any) -> Any:
        """Gives the rows that are asked for to a stream, in another order in every session."""
        asked = request.read_session
        options, name = asked.read_options, ".".join(asked.table.split("/")[1::2])
        snapshot = asked.table_modifiers.snapshot_time
        fields = list(options.selected_fields)
        restriction = options.row_restriction
        self.calls.append(("CreateReadSession", (request.parent, name, fields, restriction, snapshot)))
        self.fail("CreateReadSession")
        rows = _restricted(self.table(name).rows(snapshot), restriction).select(fields)
        number, count = len(self._sessions), rows.num_rows
        self._sessions.append(rows.take([(row + number) % count for row in range(count)]))
        session = types.ReadSession(name=f"projects/p/locations/eu/sessions/{number}")
        session.arrow_schema.serialized_schema = rows.schema.serialize().to_pybytes()
        session.estimated_total_bytes_scanned = rows.nbytes
        session.streams = [{"name": f"{session.name}/streams/0"}]
        return session

    def read_rows(self, request: Any) -> Iterator[Any]:
        """Yields the messages of a stream from a row on."""
        rows, offset = self._sessions[int(request.read_stream.split("/")[5])], request.offset
        self.calls.append(("ReadRows", (request.read_stream, offset)))
        for first in range(offset, rows.num_rows, self.message_rows):
            batch = rows.slice(first, self.message_rows).combine_chunks().to_batches()[0]
            message = types.ReadRowsResponse(row_count=batch.num_rows)
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
                writer.write_batch(batch)
            # The stream's first message is the schema, which a session gives once.
            _, second = pa.ipc.MessageReader.open_stream(sink.getvalue())
            data = second.serialize().to_pybytes()
            message.arrow_record_batch.serialized_record_batch = data
            yield message
            self.fail("ReadRows")

    def get_table(self, name: str) -> dict[str, Any]:
        """Returns the description of a table."""
        self.calls.append(("GetTable", name))
        self.fail("GetTable")
        table = self.table(name)
        since, rows = table.versions[-1]
        return {
            "tableReference": _reference(name),
            "type": table.kind,
            "schema": _schema(rows.schema),
            "numRows": str(rows.num_rows),
            "numBytes": str(rows.nbytes),
            "lastModifiedTime": str(int(since.timestamp() * 1000)),
        }

    def insert_job(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a query, or says what running it would be."""
        query = job["configuration"]["query"]["query"]
        dry = bool(job["configuration"].get("dryRun"))
        self.calls.append(("DryRun" if dry else "Query", query))
        self.fail("DryRun" if dry else "Query")
        rows, read = self.answer(query)
        bytes_read = str(sum(self.tables[name].rows(None).nbytes for name in read))
        statistics = {
            "totalBytesProcessed": bytes_read,
            "query": {
                "statementType": "SELECT" if query.lstrip()[:6].upper() in ("SELECT", "WITH A") else "SCRIPT",
                "totalBytesProcessed": bytes_read,
                "referencedTables": list(map(_reference, read)),
                "schema": _schema(rows.schema),
            },
        }
        number = len(self._results)
        configuration = json.loads(json.dumps(job["configuration"]))
        if not dry:
            self._results.append(rows)
            name = f"{PROJECT}._anonymous.result{number}"
            self.tables[name] = FakeTable([(at("00:00"), rows)])
            configuration["query"]["destinationTable"] = _reference(name)
        return {
            "jobReference": {"projectId": PROJECT, "jobId": f"job-{number}", "location": "EU"},
            "configuration": configuration | {"jobType": "QUERY"},
            "statistics": statistics,
            "status": {"state": "DONE"},
        }

    def answer_rest(self, verb: str, path: str, body: bytes) -> dict[str, Any]:
        """Answers a call of the REST API."""
        if match := re.fullmatch(r"/bigquery/v2/projects/(.+)/datasets/(.+)/tables/([^/]+)", path):
            return self.get_table(".".join(match.groups()))
        if verb == "POST" and path == f"/bigquery/v2/projects/{PROJECT}/jobs":
            return self.insert_job(json.loads(body))
        if match := re.fullmatch(rf"/bigquery/v2/projects/{PROJECT}/queries/job-(\d+)", path):
            rows = self._results[int(match[1])]
            job = {"projectId": PROJECT, "jobId": f"job-{match[1]}", "location": "EU"}
            total = str(rows.num_rows)
            return {
                "jobReference": job,
                "jobComplete": True,
                "schema": _schema(rows.schema),
                "totalRows": total,
            }
        raise missing(f"no route {verb} {path}")


def _no_query(query: str) -> tuple[pa.Table, list[str]]:
    raise invalid(f"Syntax error: Unexpected {query.split()[0]} at [1:1]")


def _restricted(rows: pa.Table, restriction: str) -> pa.Table:
    if not restriction:
        return rows
    match = re.fullmatch(r"(\w+) ([=<>]) (\d+)", restriction)
    if not match or match[1] not in rows.column_names:
        raise invalid(f"request failed: Query error: Unrecognized name: {restriction.split()[0]} at [1:1]")
    return rows.filter(
        pa.array(_COMPARED[match[2]](value, int(match[3])) for value in rows[match[1]].to_pylist())
    )


def _reference(name: str) -> dict[str, str]:
    return dict(zip(("projectId", "datasetId", "tableId"), name.split("."), strict=True))


def _schema(schema: pa.Schema) -> dict[str, Any]:
    return {"fields": [_field(column) for column in schema]}


def _field(column: pa.Field) -> dict[str, Any]:
    kind, mode = column.type, "NULLABLE"
    if pa.types.is_list(kind):
        kind, mode = kind.value_type, "REPEATED"
    if pa.types.is_struct(kind):
        return {
            "name": column.name,
            "type": "RECORD",
            "mode": mode,
            "fields": [_field(each) for each in kind],
        }
    return {"name": column.name, "type": _WORDS.get(str(kind), "TIMESTAMP"), "mode": mode}


@contextlib.contextmanager
def fake_bigquery(directory: Path) -> Iterator[tuple[FakeBigQuery, dict[str, str]]]:
    """Runs a fake; gives it, and the environment in which clients find it.

    Args:
        directory: For the key of a service account.
    """
    fake, files, tunnels = FakeBigQuery(), certificates(), Tunnels()
    with (
        _serve_grpc(fake, files) as grpc_port,
        _serve_rest(fake, None) as http_port,
        _serve_rest(fake, files) as https_port,
        serve_proxy(HOSTS, grpc_port, https_port, tunnels) as (proxy_port, refused),
    ):
        account = write_service_account(directory / "account.json", f"http://127.0.0.1:{http_port}/token")
        proxy = f"http://127.0.0.1:{proxy_port}"
        yield (
            fake,
            {
                "https_proxy": proxy,
                "HTTPS_PROXY": proxy,
                "no_proxy": "127.0.0.1,localhost",
                "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(files.authority),
                "REQUESTS_CA_BUNDLE": str(files.authority),
                "GOOGLE_APPLICATION_CREDENTIALS": str(account),
                "GOOGLE_CLOUD_PROJECT": PROJECT,
                "NO_GCE_CHECK": "true",
            },
        )
        assert refused == []


@contextlib.contextmanager
def _serve_grpc(fake: FakeBigQuery, files: Certificates) -> Iterator[int]:
    def session(request: Any, context: grpc.ServicerContext) -> Any:
        try:
            return fake.create_session(request)
        except RefusalError as error:
            context.abort(error.code, str(error))

    def rows(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        try:
            yield from fake.read_rows(request)
        except RefusalError as error:
            context.abort(error.code, str(error))

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
            if details.method == f"{_READ}CreateReadSession":
                asked, given = types.CreateReadSessionRequest, types.ReadSession
                return grpc.unary_unary_rpc_method_handler(session, asked.deserialize, given.serialize)
            asked, given = types.ReadRowsRequest, types.ReadRowsResponse
            return grpc.unary_stream_rpc_method_handler(rows, asked.deserialize, given.serialize)

    server = grpc.server(ThreadPoolExecutor(8), handlers=(Handler(),))
    pair = files.key.read_bytes(), files.certificate.read_bytes()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield port
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def _serve_rest(fake: FakeBigQuery, files: Certificates | None) -> Iterator[int]:
    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = self.path.partition("?")[0]
            if path == "/token":
                self._answer(200, {"access_token": "fake", "expires_in": 3600, "token_type": "Bearer"})
                return
            try:
                self._answer(200, fake.answer_rest(self.command, path, body))
            except RefusalError as error:
                said = str(error)
                errors = [{"reason": "invalid", "message": said}]
                self._answer(
                    error.status, {"error": {"code": error.status, "message": said, "errors": errors}}
                )

        do_POST = do_GET

        def _answer(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    with serve(Handler, files) as port:
        yield port
