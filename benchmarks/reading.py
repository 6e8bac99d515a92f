"""How fast batches come from shards: our reader against the decoder's limit and against tutorial code.

python -m benchmarks.reading

Photos of 300 pixels become shards three times: as they are (for the tutorial's code, which resizes when it
reads), as JPEG of 224 pixels, and raw. The limit decodes the same 224-pixel images from memory and does
nothing else. All use every core; they take turns. With --latency a library before the C library's own makes
each read of a shard wait, as an object store would (needs gcc).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardline.trainer.keras_compat import tensorflow_internals

_TUTORIAL = "tutorial code, 300 px"
_LIMIT = "decode only, 224 px in memory"
_OURS = ["our reader, 224 px JPEG", "our reader, 224 px raw"]

_BATCH = 64
_SIDE = 224
# Batches until a reader has come to its speed.
_BEGIN = 10
_SLOW_READS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void wait_for(int fd) {
    char name[64], path[4096];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (strstr(path, ".tfrecord")) usleep(1000 * atoi(getenv("READ_LATENCY_MS")));
}

ssize_t pread64(int fd, void *to, size_t count, off64_t offset) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread64");
    wait_for(fd);
    return real(fd, to, count, offset);
}

ssize_t pread(int fd, void *to, size_t count, off_t offset) { return pread64(fd, to, count, offset); }
"""


def contenders(directory: Path) -> dict[str, Any]:
    """Returns datasets without end by name."""
    import tensorflow as tf

    def feed(name: str) -> Any:
        from shardline.trainer.data import InputPipeline
        from shardline.trainer.manifest import load
        from shardline.trainer.sharding import EpochPlan

        manifest = load(directory / name)
        plan = EpochPlan(manifest.splits["train"].records, 1, _BATCH)
        reader = InputPipeline(directory / name, manifest, "train", plan, shuffle_seed=1)
        return reader.worker_dataset(1, 0, range(1000))

    def tutorial() -> Any:
        features = {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
        }

        def parse(record: Any) -> Any:
            example = tf.io.parse_single_example(record, features)
            image = tf.io.decode_jpeg(example["image"], channels=3)
            return tf.image.resize(image, (_SIDE, _SIDE)) / 255.0, example["label"]

        files = tf.data.Dataset.list_files(str(directory / "300" / "train-*"), shuffle=True)
        records = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)
        parsed = records.repeat().shuffle(2048).map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        return parsed.batch(_BATCH).prefetch(tf.data.AUTOTUNE)

    def limit() -> Any:
        from shardline.trainer.manifest import load

        manifest = load(directory / "224")
        paths = [str(directory / "224" / shard.file) for shard in manifest.splits["train"].shards]
        stored = {"image": tf.io.FixedLenFeature([], tf.string)}
        images = [
            tf.io.parse_single_example(record, stored)["image"].numpy()
            for record in tf.data.TFRecordDataset(paths).take(1024)
        ]
        encoded = tf.data.Dataset.from_tensor_slices(images).cache().repeat()
        decoded = encoded.map(lambda one: (tf.io.decode_jpeg(one), 0), num_parallel_calls=tf.data.AUTOTUNE)
        return decoded.batch(_BATCH).prefetch(tf.data.AUTOTUNE)

    return {
        _TUTORIAL: tutorial(),
        _LIMIT: limit(),
        _OURS[0]: feed("224"),
        _OURS[1]: feed("raw"),
    }


def drain(batches: int) -> Callable[[Any], None]:
    """Returns what takes some batches from an iterator."""
    import tensorflow as tf

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def take(iterator: Any) -> Any:
        seen = tf.constant(0)
        for _ in tf.range(batches):
            images, _ = next(iterator)
            seen += tf.shape(images)[0]
        return seen

    return lambda iterator: take(iterator).numpy()


def prepare(directory: Path, photos: int) -> None:
    """Writes the shards."""
    from benchmarks.inputs import write_photos
    from shardline.components.preprocess.run import preprocess
    from shardline.components.preprocess.settings import PreprocessSettings

    write_photos(directory / "photos", photos)
    for name, options in {
        "300": {"image_size": 0},
        "224": {"image_size": _SIDE, "encoding": "jpeg"},
        "raw": {"image_size": _SIDE, "encoding": "raw"},
    }.items():
        source = f"images:{directory / 'photos'}"
        settings = PreprocessSettings(source=source, shards=16, split={"train": 1.0}, processes=2, **options)
        preprocess(settings, directory / name)


def measure(directory: Path, names: list[str], batches: int) -> dict[str, float]:
    """Returns images a second by name, in this process."""
    datasets = contenders(directory)
    take, begin = drain(batches), drain(_BEGIN)
    found = {}
    for again in (False, True):  # the first time traces
        for name in names:
            # Anew each time: an iterator that is kept reads ahead while it is another's turn.
            iterator = iter(datasets[name])
            begin(iterator)
            started = time.perf_counter()
            take(iterator)
            if again:
                found[name] = batches * _BATCH / (time.perf_counter() - started)
            del iterator
    return found


def compare(directory: Path, rounds: int, batches: int, environ: dict[str, str]) -> None:
    """Prints images a second of all, and their ratios; ours and the others take turns as processes."""
    # With slow reads the tutorial's code would take an hour.
    peers = [_LIMIT] if "READ_LATENCY_MS" in environ else [_TUTORIAL, _LIMIT]
    found: dict[str, list[float]] = {name: [] for name in (*peers, *_OURS)}
    for _ in range(rounds):
        for names in (peers, _OURS):
            request = [str(directory), str(batches), *names]
            command = [sys.executable, "-m", "benchmarks.reading", "--child", *request]
            done = subprocess.run(command, env=environ, check=True, stdout=subprocess.PIPE, text=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                found[name].append(value)
    limit = statistics.median(found[_LIMIT])
    tutorial = statistics.median(found.get(_TUTORIAL, [float("nan")]))
    print("| | images/s | of the decode limit | of the tutorial |\n|---|---|---|---|")
    for name, values in found.items():
        median = statistics.median(values)
        spread = f"{min(values):,.0f}-{max(values):,.0f}"
        print(f"| {name} | {median:,.0f} ({spread}) | {median / limit:.2f} | {median / tutorial:.2f} |")


def child(directory: str, batches: str, *names: str) -> None:
    """Measures some contenders and prints one line of JSON."""
    if names[0] in _OURS:
        tensorflow_internals.keep_freed_memory()  # as the trainer does before it loads TensorFlow
    print(json.dumps(measure(Path(directory), list(names), int(batches))), flush=True)


def main() -> None:
    """Measures, once more with slow reads where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=190, help="of 64: more than an epoch")
    parser.add_argument("--latency", type=int, default=0, help="milliseconds of each read")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reading-") as name:
        directory = Path(name)
        prepare(directory, options.photos)
        for latency in dict.fromkeys((0, options.latency)):
            environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
            if latency:
                print(f"\neach read of a shard waits {latency} ms", flush=True)
                environ |= {"LD_PRELOAD": _slow_reads(directory), "READ_LATENCY_MS": str(latency)}
            compare(directory, options.rounds, options.batches, environ)


def _slow_reads(directory: Path) -> str:
    source, library = directory / "slow_reads.c", directory / "slow_reads.so"
    source.write_text(_SLOW_READS)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


if __name__ == "__main__":
    child(*sys.argv[2:]) if sys.argv[1:2] == ["--child"] else main()
