"""TensorFlow internals: uses of TensorFlow's undocumented interface, each with its reason.

Importing this module does not load TensorFlow: a process imports it first and calls `import_tensorflow`.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shardline.trainer.base.errors import ModelError

if TYPE_CHECKING:
    import tensorflow as tf

# Modules that Keras imports, if installed, for wrappers and plots that training does not use
# (keras/src/wrappers/sklearn_wrapper.py, keras/src/visualization): a third of the import's time.
_UNUSED = ("sklearn", "matplotlib", "cv2")

# Options of glibc's malloc.h, and their values in bytes: free memory kept at the end of a heap, and the
# smallest allocation with its own mapping.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES, _MMAP_BYTES = 256 << 20, 1 << 30


def import_tensorflow() -> None:
    """Imports TensorFlow without the notices of its C++ libraries on standard error.

    Some come before logging can be configured (tensorflow/tensorflow#100442), so file descriptor 2 is
    redirected during the import; its content is printed if the import fails.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # failures are exceptions anyway
    sys.stderr.flush()
    stderr = os.dup(2)
    hidden = [name for name in _UNUSED if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None makes their imports fail
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            import tensorflow  # noqa: F401
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            for name in hidden:
                del sys.modules[name]
    for name in ("absl", "tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory in this process for the next batch.

    By default large blocks return to the kernel, which clears every page again.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute to another value while the context lasts."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def in_thread(run: Callable[[], None], over: threading.Event, name: str) -> Iterator[None]:
    """Runs a function in a thread while the context lasts, at whose end `over` is set."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def hearing_sigterm() -> Iterator[None]:
    """Keeps the handler of SIGTERM, and runs other threads, while a strategy connects to its peers.

    TensorFlow replaces the handler by one that sets a flag (tsl/distributed_runtime/preemption,
    `SigtermNotifier`), which is undone every millisecond, and holds the GIL: its C interface does not.
    """
    from tensorflow.python import pywrap_tfe

    c, handler, over = ctypes.CDLL(None), ctypes.create_string_buffer(1024), threading.Event()
    c.sigaction(signal.SIGTERM, None, handler)

    def restore() -> None:
        while not over.wait(0.001):
            c.sigaction(signal.SIGTERM, handler, None)

        c.sigaction(signal.SIGTERM, handler, None)

    connected = patched(pywrap_tfe, "TFE_EnableCollectiveOps", _enable_collective_ops)
    with in_thread(restore, over, "sigterm"), connected:
        yield


def _enable_collective_ops(context: Any, server: bytes) -> None:
    import tensorflow as tf
    from tensorflow.python.framework import errors_impl

    directory, pointer = os.path.dirname(tf.__file__), ctypes.c_void_p
    framework, tensorflow = (
        ctypes.CDLL(f"{directory}/libtensorflow_{name}.so.2") for name in ("framework", "cc")
    )
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.argtypes, address.restype = (ctypes.py_object, ctypes.c_char_p), pointer
    framework.TF_NewStatus.restype, framework.TF_Message.restype = pointer, ctypes.c_char_p
    status = pointer(framework.TF_NewStatus())
    size = ctypes.c_size_t(len(server))
    tensorflow.TFE_EnableCollectiveOps(pointer(address(context, None)), server, size, status)
    code, message = framework.TF_GetCode(status), framework.TF_Message(status).decode()
    framework.TF_DeleteStatus(status)
    if code:
        raise errors_impl.exception_type_from_error_code(code)(None, None, message)


def iterate(batches: Iterable[Any]) -> Iterator[Any]:
    """Returns an iterator over distributed batches that releases its data at once.

    TensorFlow's hands them to devices through datasets of its own, which do not take over the options.
    """
    from tensorflow.python.data.ops import multi_device_iterator_ops

    name, create = "_create_device_dataset", multi_device_iterator_ops._create_device_dataset
    with patched(multi_device_iterator_ops, name, lambda *given: without_autotuning(create(*given))):
        return iter(batches)


def without_autotuning(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset without the autotuning thread, which sleeps for up to a minute at a time.

    The destructor of an iterator waits until it wakes (tensorflow/core/framework/model.cc, `OptimizeLoop`).
    Without it AUTOTUNE means one call for each core.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def numpy_function(
    function: Callable[..., Any], values: Sequence[tf.Tensor], types: Sequence[Any]
) -> list[tf.Tensor]:
    """Returns `tf.numpy_function` of a function or method that the caller keeps alive.

    TensorFlow keeps it, and all that it refers to, until the process ends (script_ops.py).
    """
    import tensorflow as tf

    reference: Any = weakref.WeakMethod if inspect.ismethod(function) else weakref.ref
    held = reference(function)
    results: list[tf.Tensor] = tf.numpy_function(lambda *arrays: held()(*arrays), values, types)
    return results


def check_peer(task: str, timeout_ms: int) -> None:
    """Raises tf.errors.OpError unless TensorFlow in a task ("/job:worker/replica:0/task:1") answers."""
    from tensorflow.python.eager import context

    context.context().check_collective_ops_peer_health(task, timeout_ms)


def has_several_workers(strategy: Any) -> bool:
    """Whether a strategy has several synchronous processes, whose number is private."""
    import tensorflow as tf

    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    return several and strategy.extended._num_workers > 1


def own_replica(strategy: tf.distribute.Strategy) -> tf.distribute.ReplicaContext:
    """Returns the context of this process's first replica, in which variables are local and not exchanged."""
    import tensorflow as tf

    return tf.distribute.ReplicaContext(strategy, strategy.extended._get_replica_id_in_sync_group(0))


def read_first_replica(variable: tf.Variable) -> None:
    """Makes reads of a variable that each replica has for itself return the first's, not the sum."""
    import tensorflow as tf

    variable._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA


def patch_variable_conversion() -> None:
    """Lets float(), int() and NumPy read distributed variables as they read those of a single device."""
    from tensorflow.python.distribute import values

    kind = values.DistributedVariable
    kind.__float__ = lambda self: float(self.numpy())
    kind.__int__ = lambda self: int(self.numpy())
    kind.__array__ = lambda self, dtype=None, copy=None: np.asarray(self.numpy(), dtype)


def patch_initial_values() -> None:
    """Lets the chief send initial values of int8, bfloat16 and others that TensorFlow does not broadcast."""
    import tensorflow as tf
    from tensorflow.python.ops import collective_ops

    send, receive = collective_ops.broadcast_send, collective_ops.broadcast_recv

    def wide(dtype: tf.DType) -> tf.DType:
        is_short = dtype.size < 4 and dtype not in (tf.bool, tf.float16)
        return {True: tf.int32, False: tf.float32}[dtype.is_integer] if is_short else dtype

    collective_ops.broadcast_send = lambda value, shape, dtype, *rest: send(
        tf.cast(value, wide(dtype)), shape, wide(dtype), *rest
    )
    collective_ops.broadcast_recv = lambda shape, dtype, *rest: tf.cast(
        receive(shape, wide(dtype), *rest), dtype
    )


@contextlib.contextmanager
def local_mean_reads(
    strategy: tf.distribute.Strategy, refusal: Exception | None = None, *, sums: bool = False
) -> Iterator[None]:
    """Makes reads of variables with aggregation MEAN use this process's replicas only, without an exchange.

    For code that runs just after all replicas have merged those variables; with `sums` also those with
    aggregation SUM, of which each has an equal share. Any other exchange raises `refusal`, if it is set.
    """
    import tensorflow as tf

    extended = strategy.extended
    if not has_several_workers(strategy):
        yield
        return
    reduce_to = extended._reduce_to

    def reduce_own(reduce_op: Any, value: Any, *rest: Any) -> Any:
        if sums or reduce_op == tf.distribute.ReduceOp.MEAN:
            own = [tf.convert_to_tensor(each) for each in strategy.experimental_local_results(value)]
            mean = own[0] if len(own) == 1 else tf.reduce_mean(tf.stack(own), axis=0)
            is_sum = reduce_op == tf.distribute.ReduceOp.SUM
            return mean * tf.cast(strategy.num_replicas_in_sync, mean.dtype) if is_sum else mean
        if refusal is not None:
            raise refusal
        return reduce_to(reduce_op, value, *rest)

    with patched(extended, "_reduce_to", reduce_own):
        yield


def abort_collectives(reason: str) -> None:
    """Ends every collective of this process, in any thread, with a tf.errors.UnavailableError."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.context().abort_collective_ops(tf.errors.UNAVAILABLE, reason)


def abort_peers(reason: str) -> None:
    """Ends the collectives of all peers, by the coordination service; for the process in which it runs.

    Another process would wait for that one to answer, and hold the GIL meanwhile.
    """
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.context().report_error_to_cluster(tf.errors.UNAVAILABLE, reason)


def set_heartbeat_timeout(tasks: Mapping[str, Sequence[str]], seconds: float) -> None:
    """Sets the seconds of silence after which a peer counts as dead, before the strategy is created."""
    from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
    from tensorflow.python.distribute import multi_worker_util
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=multi_worker_util.coordination_leader(dict(tasks)),
        heartbeat_timeout_in_ms=round(seconds * 1000),
        coordinated_jobs=[
            coordination_config_pb2.CoordinatedJob(name=kind, num_tasks=len(hosts))
            for kind, hosts in tasks.items()
        ],
    )


# EIGEN_MAX_ALIGN_BYTES: TensorFlow copies an array with another alignment.
_ALIGN = 64


def share_memory(value: Any, *, aligned: bool = False) -> tf.Tensor:
    """Returns a value as a tensor, which shares the memory of an array where it can.

    Any op may use it if only `aligned` arrays are shared; else only those that read it byte by byte, as
    SaveV2. `tf.constant` copies an array once, and those that are not aligned twice.
    """
    import tensorflow as tf

    if isinstance(value, np.ndarray) and not (aligned and value.ctypes.data % _ALIGN):
        with contextlib.suppress(BufferError):  # of a type that DLPack lacks, or read-only
            return tf.experimental.dlpack.from_dlpack(np.asarray(value, order="C").__dlpack__())
    return tf.constant(value)


class SumBuffers:
    """Arrays that TensorFlow takes over as results of a numpy_function, reused when no longer referenced.

    New pages from the kernel are slow. TensorFlow keeps an aligned array alive while it uses it
    (tensorflow/python/lib/core/ndarray_tensor.cc), so the reference count tells which are free.
    """

    # References to a free array: the list's, and that of the getrefcount call.
    _FREE = 2

    def __init__(self) -> None:
        self._buffers: list[npt.NDArray[Any]] = []

    def lay_out(self, arrays: Sequence[npt.NDArray[Any]]) -> tuple[npt.NDArray[Any], list[npt.NDArray[Any]]]:
        """Returns a flat float32 array with room for all arrays, and a view of it in each array's shape."""
        width = _ALIGN // 4
        padded = [-(-array.size // width) * width for array in arrays]
        end = sum(padded)
        buffer = self._take(end + width)
        first = (-buffer.ctypes.data % _ALIGN) // 4
        flat = buffer[first : first + end]
        views, start = [], 0
        for array, room in zip(arrays, padded, strict=True):
            views.append(flat[start : start + array.size].reshape(array.shape))
            flat[start + array.size : start + room] = 0
            start += room
        return flat, views

    def _take(self, size: int) -> npt.NDArray[Any]:
        buffers = self._buffers
        for index in range(len(buffers)):
            if buffers[index].size == size and sys.getrefcount(buffers[index]) == self._FREE:
                return buffers[index]
        buffers.append(np.empty(size, np.float32))
        return buffers[-1]


def branch(
    predicate: tf.Tensor, then: Callable[..., None], otherwise: Callable[..., None], args: list[tf.Tensor]
) -> None:
    """Runs one of two functions on every replica; the predicate must be the same on all.

    Inside a replica TensorFlow refuses a cond whose branches exchange with other replicas ("merge_call called
    while defining a new graph", tensorflow/tensorflow#27716), so the cond is outside the replicas.
    """
    import tensorflow as tf

    def run(function: Callable[..., Any], *arguments: Any) -> tf.Tensor:
        function(*arguments)
        return tf.constant(0)

    if tf.__internal__.distribute.strategy_supports_no_merge_call():
        tf.cond(predicate, lambda: run(then, *args), lambda: run(otherwise, *args))
        return

    def across(strategy: tf.distribute.Strategy, predicate: Any, *args: Any) -> None:
        each = strategy.extended.call_for_each_replica
        first = strategy.experimental_local_results(predicate)[0]
        tf.cond(first, lambda: run(each, then, args), lambda: run(each, otherwise, args))

    tf.distribute.get_replica_context().merge_call(across, args=(predicate, *args))


# Ops on whose results the numbers in a batch have no influence.
_SHAPES = ("Const", "Shape", "ShapeN", "Size", "Rank")


def is_same_for_examples(tensor: tf.Tensor) -> bool:
    """Whether a tensor of a graph is computed from constants and shapes, such as a range of positions."""
    captured = {id(inside): outside for outside, inside in tensor.graph.captures}
    found, seen = [tensor], set()
    while found:
        if id(each := found.pop()) in seen:
            continue
        seen.add(id(each))
        if id(each) in captured:
            outside = captured[id(each)]
            if outside.dtype.name == "resource" or not (
                hasattr(outside, "numpy") or is_same_for_examples(outside)
            ):
                return False
        elif each.op.type not in _SHAPES:
            if not each.op.inputs or each.op.op_def.is_stateful:
                return False
            found.extend(each.op.inputs)
    return True


def is_seeded() -> bool:
    """Whether the program has set the global seed, which TensorFlow does not expose."""
    from tensorflow.python.eager import context

    return context.global_seed() is not None


def seed_per_process(strategy: tf.distribute.Strategy) -> None:
    """Gives stateful random ops (tf.random) of the function being traced a different seed in each process.

    The global seed, which sets the order of examples in tf.data, and the first process's seed are unchanged.
    """
    import tensorflow as tf

    seed = tf.compat.v1.get_default_graph().seed
    if seed is not None and isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        replica = strategy.extended._get_replica_id_in_sync_group(0)
        tf.compat.v1.set_random_seed((seed + replica * 0x9E3779B1) % 2**31)


# Log messages of tensorflow/python/distribute/coordinator/cluster_coordinator.py, the only report of a lost
# worker.
_WORKER_LOST = re.compile(r"Worker /job:worker/replica:0/task:(\d+) failed")
_WORKER_BACK = re.compile(r"Worker /job:worker/replica:0/task:(\d+) has been recovered")


def report_workers(report: Callable[[str], None]) -> None:
    """Reports lost and returning workers from the coordinator's log, and drops all other messages."""

    def log_filter(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if match := _WORKER_LOST.match(message):
            report(f"worker-{match[1]} is lost; the other workers take over its step")
        elif match := _WORKER_BACK.match(message):
            report(f"worker-{match[1]} is back")
        return False

    logger = logging.getLogger("tensorflow")
    logger.setLevel(logging.INFO)
    logger.addFilter(log_filter)


_STACK_LINE = re.compile(r" {2,}|Graph execution error|Detected at node|<stack traces")
_OP_NAMES = re.compile(
    r"\{\{.*?\}\}|\[\[.*?\]\]|\[Op:\w*\](?: name: ?)?|Error in user-defined function.*? with iterator: \S+ "
)


def short_error(error: BaseException) -> str:
    """Returns the first line of TensorFlow's message without stack traces and names of ops."""
    text = _OP_NAMES.sub("", str(error).partition("Traceback (most recent call last)")[0])
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _STACK_LINE.match(line)]
    return " ".join((lines or ["?"])[0].split())[:300]


# Operations that a server, without Python or files, can run.
_PYTHON_OPERATIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")

# Prefixes of TensorFlow's operations that are not in tf.raw_ops; XlaCallModule is of models from JAX.
_INTERNAL_PREFIXES = ("_", "Xla")

# Operations that take or return a path or an address.
_FILE_OPERATIONS = re.compile(
    "File|TextLine|FixedLengthRecord|TFRecord|Reader|^Save|^Restore|DistributedSave|Checkpoint|SummaryWriter"
    "|SummaryDbWriter|^Write.*Summary|ImportEvent|(Cache|CSV|Sql|Load|Snapshot|Chunks?)Dataset|DataService"
    "|LMDB|LoadAndRemap|VocabRemapping|FixedUnigram|^Debug(Identity|Nan|Numeric)|DecodeProto|EncodeProto"
)
# A table's vocabulary is a file in the assets of a SavedModel.
_ASSET_OPERATIONS = "InitializeTableFromTextFile"


def check_operations(concrete: Any) -> None:
    """Checks that a concrete function can run without this package or the user's code.

    Raises ModelError when it calls Python, operations that are not TensorFlow's, or operations that read or
    write files.
    """
    graph = concrete.graph.as_graph_def()
    bodies = {function.signature.name: function.node_def for function in graph.library.function}
    _check([*graph.node, *(node for body in bodies.values() for node in body)], bodies)


def check_saved_model(path: Path) -> None:
    """Checks the operations of a SavedModel before it is loaded, since some run then.

    Raises ModelError as `check_operations`, and OSError or ValueError when there is no readable SavedModel.
    """
    import tensorflow as tf

    for meta in tf.__internal__.saved_model.parse_saved_model(str(path)).meta_graphs:
        bodies = {function.signature.name: function.node_def for function in meta.graph_def.library.function}
        _check(_reachable(meta, bodies), bodies)


def _reachable(meta: Any, bodies: dict[str, Any]) -> Iterator[Any]:
    """Yields the nodes that may run: all except those that only save or restore the variables."""
    objects, saver = meta.object_graph_def, meta.saver_def
    own = (saver.save_tensor_name, saver.restore_op_name) if meta.HasField("object_graph_def") else ()
    skipped = {name.partition(":")[0] for name in own}
    left = bodies | {"": [node for node in meta.graph_def.node if node.name not in skipped]}
    waiting = ["", *objects.concrete_functions]
    for node in objects.nodes:
        waiting += [*node.function.concrete_functions, node.bare_concrete_function.concrete_function_name]
    while waiting:
        for node in left.pop(waiting.pop(), ()):
            yield node
            called = (each for value in node.attr.values() for each in (value.func, *value.list.func))
            waiting += [node.op, *(function.name for function in called)]


def _check(nodes: Iterable[Any], functions: Collection[str]) -> None:
    import tensorflow as tf

    used = set()
    for node in nodes:
        to_file = node.op == "PrintV2" and node.attr["output_stream"].s.startswith(b"file:")
        used.add("PrintV2 to a File" if to_file else node.op)
    used -= set(functions)
    faults = {
        "calls Python while it predicts ({}), which a server cannot run; replace tf.py_function and "
        "tf.numpy_function by operations of TensorFlow or Keras": used.intersection(_PYTHON_OPERATIONS),
        "reads or writes files while it predicts ({}), and such a model is not loaded; give it the data as "
        "weights or inputs": {
            name for name in used if _FILE_OPERATIONS.search(name) and not name.startswith(_ASSET_OPERATIONS)
        },
        "needs operations that are not TensorFlow's own ({}), which a server does not have; do without "
        "them": {
            name for name in used if not name.startswith(_INTERNAL_PREFIXES) and not hasattr(tf.raw_ops, name)
        },
    }
    for message, names in faults.items():
        if names:
            raise ModelError(f"the model {message.format(', '.join(sorted(names)))}")
