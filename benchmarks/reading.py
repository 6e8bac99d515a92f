"""How fast batches come from shards: our reader against the decoder's limit and against tutorial code.

python -m benchmarks.reading

Photos of 300 pixels become shards three times: as they are (for the tutorial's code, which resizes when it
reads), as JPEG of 224 pixels, and raw. The limit decodes the same 224-pixel images from memory and does
nothing else. All use every core; they take turns. With --latency a library before the C library's own makes
each read of a shard wait, as an object store would (needs gcc).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
        from trainer.data.manifest import load
        from trainer.data.order import EpochPlan
        from trainer.data.pipeline import Feed

        manifest = load(directory / name)
        plan = EpochPlan(manifest.splits["train"].records, 1, _BATCH)
        reader = Feed(directory / name, manifest, "train", plan, shuffle_seed=1)
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
        from trainer.data.manifest import load

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
        "tutorial code, 300 px": tutorial(),
        "decode only, 224 px in memory": limit(),
        "our reader, 224 px JPEG": feed("224"),
        "our reader, 224 px raw": feed("raw"),
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
    from components.preprocess.run import preprocess
    from components.preprocess.settings import PreprocessSettings

    write_photos(directory / "photos", photos)
    for name, options in {
        "300": {"image_size": 0},
        "224": {"image_size": _SIDE, "encoding": "jpeg"},
        "raw": {"image_size": _SIDE, "encoding": "raw"},
    }.items():
        source = f"images:{directory / 'photos'}"
        settings = PreprocessSettings(source=source, shards=16, split={"train": 1.0}, processes=2, **options)
        preprocess(settings, directory / name)


def measure(directory: Path, rounds: int, batches: int) -> None:
    """Prints images a second of all, and their ratios."""
    datasets = contenders(directory)
    if "READ_LATENCY_MS" in os.environ:
        del datasets["tutorial code, 300 px"]  # it would take an hour
    take, begin = drain(batches), drain(_BEGIN)
    found: dict[str, list[float]] = {name: [] for name in datasets}
    for number in range(rounds + 1):
        for name, dataset in datasets.items():
            # Anew each time: an iterator that is kept reads ahead while it is another's turn.
            iterator = iter(dataset)
            begin(iterator)
            started = time.perf_counter()
            take(iterator)
            if number:  # the first round traces
                found[name].append(batches * _BATCH / (time.perf_counter() - started))
            del iterator
    limit = statistics.median(found["decode only, 224 px in memory"])
    tutorial = statistics.median(found.get("tutorial code, 300 px", [float("nan")]))
    print("| | images/s | of the decode limit | of the tutorial |\n|---|---|---|---|")
    for name, values in found.items():
        median = statistics.median(values)
        spread = f"{min(values):,.0f}-{max(values):,.0f}"
        print(f"| {name} | {median:,.0f} ({spread}) | {median / limit:.2f} | {median / tutorial:.2f} |")


def main() -> None:
    """Measures, once more with slow reads where that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--photos", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=190, help="of 64: more than an epoch")
    parser.add_argument("--latency", type=int, default=0, help="milliseconds of each read")
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.directory:
        measure(options.directory, options.rounds, options.batches)
        return
    with tempfile.TemporaryDirectory(prefix="reading-") as name:
        directory = Path(name)
        prepare(directory, options.photos)
        for latency in dict.fromkeys((0, options.latency)):
            environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
            if latency:
                print(f"\neach read of a shard waits {latency} ms", flush=True)
                environ |= {"LD_PRELOAD": _slow_reads(directory), "READ_LATENCY_MS": str(latency)}
            command = [sys.executable, "-m", "benchmarks.reading", "--directory", name]
            command += ["--rounds", str(options.rounds), "--batches", str(options.batches)]
            subprocess.run(command, env=environ, check=True)


def _slow_reads(directory: Path) -> str:
    source, library = directory / "slow_reads.c", directory / "slow_reads.so"
    source.write_text(_SLOW_READS)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


if __name__ == "__main__":
    main()
