"""`import shardline`, and of all that it has, changes nothing in the process but its modules."""

import json
import subprocess
import sys

from tests.helpers.replicas import ROOT

PROGRAM = """
import atexit, importlib, json, locale, logging, os, pkgutil, random, signal, sys, threading, warnings
import google.cloud.aiplatform, google_cloud_pipeline_components, keras, kfp.compiler, kfp.local, numpy
import tensorflow

def state():
    root = logging.getLogger()
    return {
        "excepthook": sys.excepthook,
        "threads": (threading.excepthook, threading.active_count()),
        "unraisable": sys.unraisablehook,
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "warnings": list(warnings.filters),
        "logging": (root.level, list(root.handlers)),
        "exit": atexit._ncallbacks(),
        "forks": list(forks),
        "locale": locale.setlocale(locale.LC_ALL),
        "random": (random.getstate(), numpy.random.get_state()[1].tolist()),
        "precision": keras.config.dtype_policy().name,
        "path": list(sys.path),
        "directory": os.getcwd(),
    }

forks, register = [], os.register_at_fork
os.register_at_fork = lambda **given: (forks.append(sys._getframe(1).f_code.co_filename), register(**given))
sys.excepthook = lambda *error: None
before = state()
import shardline
loaded = [name for name in sys.modules if name.startswith("shardline.")]
for name in shardline.__all__:
    getattr(shardline, name)
for package in ("trainer", "components", "pipelines"):
    root = importlib.import_module(f"shardline.{package}")
    for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
after = state()
print(json.dumps([loaded, [name for name in before if before[name] != after[name]]]))
"""


def test_imports_change_nothing() -> None:
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], []]
