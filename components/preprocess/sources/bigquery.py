"""BigQuery: rows of a table, or of a query's result, read by the Storage Read API as of one point in time.

The time is in the source string, TABLE@TIME, or where a query has {snapshot}. `pin_snapshot` fills it in
before a dataset is made: the manifest names it, and the same source gives the same rows again. The bytes that
are billed are reported before they are read. Google's clients are loaded on first use.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Any, NamedTuple

from shardline.components.preprocess.lazy import pa
from shardline.components.preprocess.sources.columns import (
    NO_TYPES,
    ColumnUse,
    Rows,
    Scan,
    TypedColumns,
    Types,
    override_type,
    typed,
)
from shardline.components.preprocess.sources.example import WHOLE_FILE, Span
from shardline.components.preprocess.sources.table import TableRows
from shardline.components.storage import resolve
from shardline.components.text import size as size_text
from shardline.components.vertex import platform_error, with_retries
from shardline.trainer.base.errors import ShardlineError, SourceError
from shardline.trainer.base.progress import report

PREFIX = "bigquery:"
#: Placeholder of a query's snapshot time.
SNAPSHOT = "{snapshot}"

_MOMENT = r"(?:[^\s{]|\{[^{}]*\})+"
_NAME = r"(?:[\w-]|\{date[^{}]*\})+"
_TABLE = re.compile(
    rf"((?:[\w.-]+:)?{_NAME}\.{_NAME}\.{_NAME})(?:@({_MOMENT}))?(?:\s+WHERE\s+(\S.*))?",
    re.IGNORECASE | re.DOTALL,
)
_QUERY = re.compile(r"\s*(SELECT|WITH)\b", re.IGNORECASE)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_SHOWN = 80

_TYPES = {
    "INTEGER": "int64", "INT64": "int64", "BOOLEAN": "int64", "BOOL": "int64", "FLOAT": "float32",
    "FLOAT64": "float32", "NUMERIC": "float32", "BIGNUMERIC": "float32", "STRING": "string", "BYTES": "bytes",
    "TIMESTAMP": "time", "DATETIME": "time", "DATE": "date",
}  # fmt: skip
_SCOPES = ("https://www.googleapis.com/auth/cloud-platform",)
_PRICES = "cloud.google.com/bigquery/pricing"

# Types of tables that store rows, and have a time of their last change.
_OWN_ROWS = ("TABLE", "SNAPSHOT")
# SQL that may give other rows each time that it runs; the most tables of a query that BigQuery names.
_CHANGING = re.compile(r"\b(CURRENT_[A-Z]+|RAND|GENERATE_UUID|TABLESAMPLE|SESSION_USER)\b", re.IGNORECASE)
_MOST_NAMED = 50

# Timeout of a stream, after which it is requested again from where it is; this is not a failure.
_STREAM_SECONDS = 600.0


class Reference(NamedTuple):
    """Parsed source string: a table with its snapshot time and row filter, or a query; "" for none."""

    table: str = ""
    snapshot: str = ""
    row_filter: str = ""
    query: str = ""

    @property
    def name(self) -> str:
        """The table, or the beginning of the query, for messages."""
        text = self.table or " ".join(self.query.split())
        return PREFIX + (text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")

    @property
    def read_time(self) -> datetime | None:
        """The snapshot time of a table, or the first that a query names in the form of `pin_snapshot`."""
        times = [self.snapshot] if self.snapshot else _TIME.findall(self.query)
        return min(map(_time, times), default=None)


def parse(source: str) -> Reference:
    """Parses a source "bigquery:..."; SourceError if it has another form."""
    rest = source.removeprefix(PREFIX).strip()
    if _QUERY.match(rest):
        return Reference(query=rest)
    match = _TABLE.fullmatch(rest)
    if not match:
        raise SourceError(
            f"source {source!r} is neither bigquery:PROJECT.DATASET.TABLE[@TIME] [WHERE FILTER] nor "
            "bigquery:SELECT ...; wildcards and partitions ($) need a query"
        )
    table, snapshot, row_filter = (text or "" for text in match.groups())
    if snapshot and "{" not in snapshot:
        _time(snapshot)
    return Reference(table, snapshot, row_filter)


def pin_snapshot(source: str, time: datetime | None = None, earlier: str = "") -> str:
    """Returns a source with a snapshot time: a BigQuery source without one gets `time`, now by default.

    If `earlier` is the same source at any time, it is returned: an interrupted run keeps its snapshot.
    """
    if not source.startswith(PREFIX):
        return source
    reference = parse(source)
    if reference.table and not reference.snapshot:
        head, table, tail = source.partition(reference.table)
        source = f"{head}{table}@{SNAPSHOT}{tail}"
    if re.fullmatch(re.escape(source).replace(re.escape(SNAPSHOT), r"[\dTZ:.+-]+"), earlier):
        return earlier
    snapshot = (time or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="milliseconds")
    return source.replace(SNAPSHOT, snapshot.replace("+00:00", "Z"))


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise SourceError(
            f"{text!r} is not a time; write it as in TABLE@2026-11-20T10:00:00Z, or leave "
            "it out for the current rows"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


class Service:
    """Google's clients for BigQuery, and the project that is billed: the run's, else the credentials'."""

    def __init__(self, reference: Reference) -> None:
        self.name = reference.name
        with self.calling():
            import google.auth
            from google.cloud import bigquery
            from google.cloud.bigquery_storage_v1 import types
            from google.cloud.bigquery_storage_v1.services.big_query_read import BigQueryReadClient

            credentials, project = google.auth.default(scopes=_SCOPES)
            # On Vertex AI, the credentials' project is Google's.
            project = os.environ.get("CLOUD_ML_PROJECT_ID") or project
            self.project = project or reference.table.rpartition(".")[0].rpartition(".")[0]
            if not self.project:
                raise SourceError(f"no project to bill for {self.name}; set GOOGLE_CLOUD_PROJECT")
            self.rest = bigquery.Client(project=self.project, credentials=credentials)
            self.reader = BigQueryReadClient(credentials=credentials)
            self._types = types

    @contextlib.contextmanager
    def calling(self, snapshot: str = "") -> Iterator[None]:
        """Turns errors of the clients into one line; wrong names and queries are a SourceError."""
        try:
            yield
        except ShardlineError:
            raise
        except ImportError as error:
            if not str(error.name or "").startswith(("google", "pyarrow")):
                raise
            raise SourceError(f"source {self.name!r} needs: pip install 'shardline[bigquery]'") from None
        except Exception as error:
            from google.api_core import exceptions as api

            message = " ".join(str(getattr(error, "message", "") or error).split()).rstrip(".")[:300]
            if isinstance(error, api.NotFound):
                raise SourceError(f"{self.name} does not exist: {message}; check the name") from None
            if isinstance(error, api.BadRequest) and "session expired" in message.lower():
                raise SourceError(
                    f"cannot read {self.name}: {message}; run again, from the beginning"
                ) from None
            if isinstance(error, api.BadRequest):
                as_of = f" as of {snapshot}" if snapshot else ""
                hint = "; history is kept for 7 days, or as set for the dataset" if snapshot else ""
                raise SourceError(f"BigQuery refuses {self.name}{as_of}: {message}{hint}") from None
            if type(error).__module__.startswith("pyarrow"):
                raise SourceError(f"cannot read {self.name}: {message}") from None
            raise platform_error(f"read {self.name}", error) from None

    def find_table(self, name: str) -> Any:
        """Returns the metadata of a table; SourceError for views and external data."""
        with self.calling():
            table = self.rest.get_table(name)
        if table.table_type not in _OWN_ROWS:
            raise SourceError(
                f"{self.name} is of type {table.table_type}, which has no snapshots; read it "
                f"with a query: bigquery:SELECT ... FROM `{name}`"
            )
        return table

    def dry_run(self, query: str) -> Any:
        """Returns the dry-run job of a query, with its schema, tables and the bytes that it would process."""
        from google.cloud import bigquery

        with self.calling():
            job = self.rest.query(query, job_config=bigquery.QueryJobConfig(dry_run=True))
        if job.statement_type != "SELECT":
            raise SourceError(f"{self.name} is a statement {job.statement_type}, not a query; write a SELECT")
        return job

    def run_query(self, query: str) -> str:
        """Runs a query and returns the table of its result, which BigQuery removes after a day."""
        with self.calling():
            job = self.rest.query(query)
            job.result(max_results=0)
        return f"{job.destination.project}.{job.destination.dataset_id}.{job.destination.table_id}"

    def session(self, table: str, names: Sequence[str], reference: Reference) -> Any:
        """Opens a session that reads some columns of a table; nothing is billed until its rows are read."""
        project, dataset, name = table.rsplit(".", 2)
        options = self._types.ReadSession.TableReadOptions(
            selected_fields=list(names),
            row_restriction=reference.row_filter,
            arrow_serialization_options={"buffer_compression": "LZ4_FRAME"},
        )
        session = self._types.ReadSession(
            table=f"projects/{project}/datasets/{dataset}/tables/{name}",
            data_format=self._types.DataFormat.ARROW,
            read_options=options,
        )
        if reference.snapshot:
            session.table_modifiers.snapshot_time = reference.read_time
        with self.calling(reference.snapshot):
            # One stream is faster than one process can store its rows.
            return self.reader.create_read_session(
                parent=f"projects/{self.project}", read_session=session, max_stream_count=1
            )


def _read_stream(reader: Any, name: str) -> Iterator[bytes]:
    """Yields the record batches of a stream of a session, which is resumed after an error."""
    offset, messages = 0, None

    def next_message(name: str) -> Any:
        nonlocal messages
        try:
            if messages is None:
                request = {"read_stream": name, "offset": offset}
                messages = iter(reader.read_rows(**request, retry=None, timeout=_STREAM_SECONDS))
            return next(messages, None)
        except Exception:
            messages = None
            raise

    while (message := with_retries(next_message, name)) is not None:
        offset += message.row_count
        yield message.arrow_record_batch.serialized_record_batch


class QueryColumns(TypedColumns):
    """Columns of a table, or of a query's result; the query is not run or billed until they are read."""

    def __init__(self, source: str, overrides: Types = NO_TYPES) -> None:
        self._reference = reference = parse(source)
        self._service = Service(reference)
        if reference.query:
            job = self._service.dry_run(reference.query)
            schema, self._processed = job.schema, job.total_bytes_processed or 0
        else:
            schema, self._processed = self._service.find_table(reference.table).schema, 0
        super().__init__(
            Scan({f.name: override_type(_column_type(f), overrides.get(f.name, "")) for f in schema or ()})
        )

    @functools.cached_property
    def _table(self) -> str:
        return self._reference.table or self._service.run_query(self._reference.query)

    def cost(self, names: Sequence[str]) -> str:
        """Describes what BigQuery bills: the bytes that are read, by its own estimate."""
        if self._reference.query:
            return f"the query processes {size_text(self._processed)}; its result is read as well"
        session = self._service.session(self._table, names, self._reference)
        return f"{len(names)} columns, {size_text(session.estimated_total_bytes_scanned)} to read"

    def batches(self, names: Sequence[str], numbers: Iterator[int] | None = None) -> Iterator[Rows]:
        """Yields the values of some columns, in any order of the rows."""
        session = self._service.session(self._table, names, self._reference)
        schema = pa.ipc.read_schema(pa.py_buffer(session.arrow_schema.serialized_schema))
        streams = (_read_stream(self._service.reader, stream.name) for stream in session.streams)
        first = 1
        with self._service.calling(self._reference.snapshot):
            for message in chain.from_iterable(streams):
                batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
                columns = {name: typed(batch[name], self.types[name]) for name in names}
                yield Rows(columns, batch.num_rows, first=first)
                first += batch.num_rows


def _column_type(field: Any) -> str:
    """Returns the type of a column as in `TypedColumns`, or BigQuery's name of it."""
    if field.mode == "REPEATED":
        return f"REPEATED {field.field_type}"
    return _TYPES.get(field.field_type) or str(field.field_type)


class BigQuery(TableRows):
    """Rows of a table, or of a query's result.

    A column image holds encoded images (BYTES), or URLs (gs://...). Without a column key, the key is a hash
    of the row's values, since rows have no stable order.
    """

    def __init__(self, source: str, use: ColumnUse) -> None:
        self._own = QueryColumns(source, use.types)
        super().__init__(parse(source).name, self._own, use, ("string", "bytes"))
        self.numbers_copies = "key" not in self._names

    def report(self) -> None:
        """Reports what reading costs, and how columns are read."""
        report("preprocess", f"{self._name}: {self.cost()}")
        super().report()

    def cost(self) -> str:
        """Describes what reading the rows is billed for."""
        return f"{self._own.cost(self._used())}; see {_PRICES}"

    def _keys(self, rows: Rows, columns: Mapping[str, Any]) -> Sequence[str]:
        import xxhash  # not installed where pipelines are only compiled

        from shardline.components.preprocess.tfrecord import encode

        values = {
            name: column.fill_null(0) if column.null_count else column
            for name, column in columns.items()
            if name not in {label.name for label in self.labels}
        }
        if "image" in self._names:
            values["image"] = rows.columns[self._names["image"]]
        return [xxhash.xxh3_128_hexdigest(entry) for entry in encode(values).to_pylist()]

    def _row_name(self, rows: Rows, index: int, keys: Sequence[str]) -> str:
        return keys[index]

    def _image(self, value: str | bytes, rows: Rows) -> Span | bytes:
        if isinstance(value, str) and "://" not in value:
            raise ValueError(f"has an image that is not a URL (gs://...) in column {self._names['image']!r}")
        return value if isinstance(value, bytes) else Span(resolve(value), 0, WHOLE_FILE)


def version(source: str, features: Mapping[str, str]) -> tuple[str, str]:
    """Returns an identifier of the content of a source, and a description of it for a person.

    If the content may change undetected, the first is "", and the second the reason. `features` are names of
    columns by Shardline's.
    """
    reference = parse(source)
    service = Service(reference)
    job = service.dry_run(reference.query) if reference.query else None
    with service.calling():
        tables = [
            service.rest.get_table(name) for name in (job.referenced_tables if job else [reference.table])
        ]
    schema = job.schema if job else tables[0].schema
    if reason := _reason_unversioned(reference, tables, schema or (), features):
        return "", reason
    read_time, states = reference.read_time, list[str]()
    for table in tables:
        state: tuple[object, ...] = (table.project, table.dataset_id, table.table_id)
        if read_time and (table.modified is None or table.modified > read_time):
            state += (read_time.isoformat(),)
        else:  # including rows in the streaming buffer
            new = table.streaming_buffer
            state += (str(table.modified), table.num_rows, table.num_bytes)
            state += ((new.estimated_rows, new.estimated_bytes, new.oldest_entry_time) if new else None,)
        states.append(repr(state))
    count = sum(table.num_rows or 0 for table in tables)
    last = max((str(table.modified)[:19] for table in tables), default="never")
    text = f"{count:,} rows, {size_text(sum(table.num_bytes or 0 for table in tables))}, changed {last}"
    return "\n".join(sorted(states)), text


def _reason_unversioned(
    reference: Reference, tables: Sequence[Any], schema: Sequence[Any], features: Mapping[str, str]
) -> str:
    """Returns why the content may change although the tables do not; "" if it cannot."""
    if match := _CHANGING.search(reference.query or reference.row_filter):
        return f"{match[0]} gives another result each time"
    if not 0 < len(tables) < _MOST_NAMED:
        return f"BigQuery names {len(tables)} tables that it reads, and never more than {_MOST_NAMED}"
    for table in tables:
        if table.table_type not in _OWN_ROWS:
            return f"{table.reference} is of type {table.table_type}, which may change undetected"
    image = features.get("image", "image")
    if any(field.name == image and _column_type(field) == "string" for field in schema):
        return f"images at URLs in column {image!r} may change undetected"
    return ""
