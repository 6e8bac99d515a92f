"""Every way of writing shards that is compared: each runs once, in a process of its own, after its imports.

A contender is a function that imports what it needs and returns the work as a function without arguments;
only that is timed. `python -m benchmarks.contenders NAME INPUT OUT PROCESSES` prints what it took as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.packed import CLASSES, PACKED_VARIABLE

SHARDS = 16
Work = Callable[[], object]


def copy(source: str, out: Path, processes: int) -> Work:
    """Plain Python: read every image and append it to one of 16 files. No framing, no checksum."""
    items = _shuffled(source)
    parts = [(source, items[p::processes], out / f"part{p}") for p in range(processes)]
    pool = _started_pool(processes)

    def work() -> None:
        if pool:
            pool.starmap(_copy, parts, chunksize=1)
            pool.close()
            pool.join()
        else:
            _copy(*parts[0])

    return work


def plain(source: str, out: Path, processes: int) -> Work:
    """Plain Python that writes TFRecords of Examples, and looks at no image."""
    return _plain(source, out, lambda image: None)


def decoded(source: str, out: Path, processes: int) -> Work:
    """The same, after TensorFlow has decoded each image, so that training can."""
    import tensorflow as tf

    return _plain(source, out, tf.io.decode_png if _is_packed(source) else tf.io.decode_jpeg)


def _plain(source: str, out: Path, check: Callable[[bytes], object]) -> Work:
    import pyarrow as pa
    from google_crc32c import value

    from shardline.components.preprocess.tfrecord import encode, image_start, mask

    items = _shuffled(source)
    labels = encode({"label": pa.array(range(CLASSES))}).to_pylist()

    def work() -> None:
        files = [(out / f"{i:05d}.tfrecord").open("wb") for i in range(SHARDS)]
        for index, (image, label) in enumerate(_read(source, items)):
            check(image)
            frame, start, _ = image_start(len(image), len(labels[label]))
            record = start + image + labels[label]
            files[index % SHARDS].write(frame + record + mask(value(record)))
        for file in files:
            file.close()

    return work


def tutorial(source: str, out: Path, processes: int) -> Work:
    """TensorFlow's guide "TFRecord and tf.train.Example", with its helper functions as they stand there."""
    import tensorflow as tf

    def bytes_feature(value: Any) -> Any:
        if isinstance(value, type(tf.constant(0))):
            value = value.numpy()
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))

    return _with_tensorflow(source, out, bytes_feature)


def trimmed(source: str, out: Path, processes: int) -> Work:
    """The same without the helper's look at the kind of its value, which takes a third of the time."""
    import tensorflow as tf

    return _with_tensorflow(
        source, out, lambda value: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    )


def _with_tensorflow(source: str, out: Path, bytes_feature: Callable[[bytes], Any]) -> Work:
    import tensorflow as tf

    items = _shuffled(source)

    def work() -> None:
        writers = [tf.io.TFRecordWriter(str(out / f"{i:05d}.tfrecord")) for i in range(SHARDS)]
        for index, (image, label) in enumerate(_read(source, items)):
            features = {
                "image": bytes_feature(image),
                "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writers[index % SHARDS].write(example.SerializeToString())
        for writer in writers:
            writer.close()

    return work


def tfds(source: str, out: Path, processes: int) -> Work:
    """TensorFlow Datasets' own writer, which shuffles and shards; it has one process."""
    import tensorflow_datasets

    class Photos(tensorflow_datasets.core.GeneratorBasedBuilder):
        """The photos of the benchmark."""

        VERSION = tensorflow_datasets.core.Version("1.0.0")

        def _info(self) -> Any:
            features = tensorflow_datasets.features
            return tensorflow_datasets.core.DatasetInfo(
                builder=self,
                features=features.FeaturesDict(
                    {
                        "image": features.Image(encoding_format="jpeg"),
                        "label": features.ClassLabel(num_classes=CLASSES),
                    }
                ),
            )

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            for path, label in _photos(source):
                yield path, {"image": path, "label": label}

    tensorflow_datasets.disable_progress_bar()
    return lambda: Photos(data_dir=str(out)).download_and_prepare()


def beam(source: str, out: Path, processes: int) -> Work:
    """Apache Beam's DirectRunner with WriteToTFRecord; one process works in memory, several do not."""
    import apache_beam
    import tensorflow as tf
    from apache_beam.options.pipeline_options import PipelineOptions

    items = _shuffled(source)
    mode = "in_memory" if processes == 1 else "multi_processing"
    options = PipelineOptions([f"--direct_running_mode={mode}", f"--direct_num_workers={processes}"])

    def serialized(item: tuple[str, int]) -> bytes:
        features = {
            "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[Path(item[0]).read_bytes()])),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[item[1]])),
        }
        example: bytes = tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
        return example

    def work() -> None:
        with apache_beam.Pipeline("DirectRunner", options=options) as pipeline:
            _ = (
                pipeline
                | apache_beam.Create(items)
                | apache_beam.Map(serialized)
                | apache_beam.io.WriteToTFRecord(str(out / "beam"), num_shards=SHARDS)
            )

    return work


def ours(source: str, out: Path, processes: int) -> Work:
    """`shardline preprocess`, from the source string to the manifest."""
    from shardline.components.preprocess.run import preprocess
    from shardline.components.preprocess.settings import PreprocessSettings

    # All examples into one split of 16 shards, as the others do.
    settings = PreprocessSettings(
        source=_source_string(source),
        features={"image": "image", "label": "label"} if source.endswith(".tfrecord") else {},
        split={"train": 1.0},
        shards=SHARDS,
        processes=processes,
    )
    return lambda: preprocess(settings, out)


CONTENDERS: dict[str, Callable[[str, Path, int], Work]] = {
    "copy": copy,
    "plain": plain,
    "decoded": decoded,
    "tutorial": tutorial,
    "trimmed": trimmed,
    "tfds": tfds,
    "beam": beam,
    "ours": ours,
}


def _source_string(source: str) -> str:
    if source.endswith(".tfrecord"):
        return f"tfrecord:{source}"
    return "benchmarks.packed:Packed" if _is_packed(source) else f"images:{source}"


def _is_packed(source: str) -> bool:
    """Returns whether the input is an .npy file of images, and not a folder of photos."""
    return source.endswith(".npy")


def _shuffled(source: str) -> list[tuple[str | int, int]]:
    """Returns (file or row, label) of every image, shuffled."""
    if _is_packed(source):
        import numpy as np

        count = len(np.load(source, mmap_mode="r"))
        items: list[tuple[str | int, int]] = [(row, row % CLASSES) for row in range(count)]
    else:
        items = list(_photos(source))
    random.Random(0).shuffle(items)
    return items


def _photos(source: str) -> list[tuple[str, int]]:
    return [
        (entry.path, label)
        for label in range(CLASSES)
        for entry in sorted(os.scandir(f"{source}/class{label}"), key=lambda entry: entry.name)
    ]


def _read(source: str, items: Sequence[tuple[str | int, int]]) -> Iterator[tuple[bytes, int]]:
    """Yields (image, label)."""
    if _is_packed(source):
        import numpy as np

        rows = np.load(source, mmap_mode="r")
        for row, label in items:
            yield rows[row].tobytes(), label
    else:
        for path, label in items:
            with open(path, "rb") as file:
                yield file.read(), label


def _copy(source: str, items: Sequence[tuple[str | int, int]], out: Path) -> None:
    out.mkdir(parents=True)
    files = [(out / f"{i:05d}").open("wb") for i in range(SHARDS)]
    writes = [file.write for file in files]
    for index, (image, _) in enumerate(_read(source, items)):
        writes[index % SHARDS](image)
    for file in files:
        file.flush()
        os.fsync(file.fileno())
        file.close()


def _started_pool(processes: int) -> Any:
    """Returns a pool whose processes have started, or None for one process."""
    if processes == 1:
        return None
    pool = multiprocessing.get_context("spawn").Pool(processes)
    pool.map(time.sleep, [0.2] * processes, chunksize=1)
    return pool


def peak_mb() -> float:
    """Returns the largest resident memory of this process or of one that it waited for, in MB."""
    status = Path("/proc/self/status").read_text()
    own = int(status.partition("VmHWM:")[2].split()[0])
    return max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024 / 1e6


def main(name: str, source: str, out: str, processes: str) -> None:
    """Runs one contender once."""
    if _is_packed(source):
        os.environ[PACKED_VARIABLE] = source
    work = CONTENDERS[name](source, Path(out), int(processes))
    cpu, began = os.times(), time.perf_counter()
    work()
    seconds, cpu_after = time.perf_counter() - began, os.times()
    took = {
        "seconds": seconds,
        "cpu_seconds": sum(cpu_after[:4]) - sum(cpu[:4]),
        "peak_mb": peak_mb(),
    }
    print(json.dumps(took))


if __name__ == "__main__":
    main(*sys.argv[1:])
