"""Answers requests to SavedModels as TensorFlow Serving's REST interface does, without our code.

Started as a script: a JSON list of [saved model, request body] comes in, a list of answers goes out.
"""

import base64
import json
import sys


class Refuse:
    """Stands in for a machine on which Shardline is not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("shardline", "trainer", "components", "pipelines"):
            raise ImportError("not in a clean process: " + name)


def decode(value):
    """Returns {"b64": ...} as bytes, wherever it is."""
    if isinstance(value, dict) and set(value) == {"b64"}:
        return base64.b64decode(value["b64"])
    return [decode(item) for item in value] if isinstance(value, list) else value


def answer(loaded, body):
    import tensorflow as tf

    signature = loaded.signatures[body.get("signature_name", "serving_default")]
    (_, takes), rows = signature.structured_input_signature, body["instances"]
    if len(takes) == 1 and not (isinstance(rows[0], dict) and set(rows[0]) == set(takes)):
        rows = [{next(iter(takes)): row} for row in rows]
    arguments = {
        name: tf.constant([decode(row[name]) for row in rows], spec.dtype) for name, spec in takes.items()
    }
    outputs = {name: value.numpy() for name, value in signature(**arguments).items()}
    plain = {
        name: [item.decode() for item in value] if value.dtype == object else value.tolist()
        for name, value in outputs.items()
    }
    return {"predictions": [dict(zip(plain, row)) for row in zip(*plain.values())]}  # noqa: B905


def main():
    sys.meta_path.insert(0, Refuse())
    import tensorflow as tf

    loaded, answers = {}, []
    for path, body in json.load(sys.stdin):
        loaded[path] = loaded.get(path) or tf.saved_model.load(path)
        answers.append(answer(loaded[path], body))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
