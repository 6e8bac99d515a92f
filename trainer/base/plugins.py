"""Plug-ins: a user's functions and classes, loaded by import strings such as `pkg.module:name`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.util
import os
import pkgutil
import symtable
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from shardline.trainer.base import code
from shardline.trainer.base.deserialize import did_you_mean, nearest
from shardline.trainer.base.errors import ModelError, ShardlineError

#: Built-in model functions by name, as import strings.
BUILT_IN = {
    "mnist_cnn": "shardline.trainer.models.zoo:build_mnist_cnn",
    "resnet50": "shardline.trainer.models.zoo:build_resnet50",
    "mlp": "shardline.trainer.models.zoo:build_mlp",
    "text": "shardline.trainer.models.zoo:build_text",
}

#: Prefix of the name of a model of keras.applications.
KERAS_PREFIX = "keras:"
_APPLICATION = "shardline.trainer.models.zoo:build_application"

# Characters of an argument that are shown as they are.
_LONGEST_TEXT = 80
# Packages identified by their versions, not by their files.
_VERSIONED_PACKAGES = {"", "shardline", "keras", "tensorflow"}


def import_string(model: str) -> str:
    """Returns the import string of a model: a built-in name, keras:NAME, or `pkg.module:function`."""
    reference = _APPLICATION if model.startswith(KERAS_PREFIX) else BUILT_IN.get(model, model)
    module, _, name = reference.partition(":")
    if not module or not name:
        raise ModelError(
            f"unknown model {model!r}; built in are {', '.join(BUILT_IN)} and {KERAS_PREFIX}NAME, your own "
            f"is pkg.module:function{did_you_mean(model, BUILT_IN, after='; ')}"
        )
    return reference


def load(
    reference: str, kind: str, error: type[ShardlineError] = ModelError, *, known: Sequence[str] = ()
) -> Any:
    """Returns the object of an import string, from a module of the working directory or an installed one.

    Raises `error` when there is none or the import fails. Its message has `kind`, what the object is for
    ("model", "source"), and `known`, the other accepted forms.
    """
    module_name, _, name = reference.partition(":")
    forms = f"; known: {', '.join(known)}" if known else ""
    if not module_name or not name:
        raise error(f"unknown {kind} {reference!r}: not an import string such as pkg.module:name{forms}")
    _make_working_directory_importable()
    try:
        _load_local_module(module_name.partition(".")[0])
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as failure:
        missing = isinstance(failure, ModuleNotFoundError) and failure.name
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise error(
                f"unknown {kind} {reference!r}: no module {missing!r}{_available_modules(missing)}{forms}"
            ) from None
        raise error(f"{kind} {reference!r}: importing {module_name} failed: {describe(failure)}") from failure
    try:
        return getattr(module, name)
    except AttributeError:
        own = (key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name)
        there = nearest(name, (key for key in own if not key.startswith("_"))) or "nothing public"
        raise error(f"unknown {kind} {reference!r}: {module_name} has no {name!r}, it has {there}") from None


@contextlib.contextmanager
def calling(
    what: str,
    error: type[ShardlineError],
    advice: str = "",
    explain: Callable[[BaseException], str] | None = None,
) -> Iterator[None]:
    """Turns an exception of a user's code, SystemExit included, into an `error` "WHAT: CAUSE; ADVICE".

    `explain` returns the cause in one line; by default `describe` does.
    """
    try:
        yield
    except ShardlineError:
        raise
    except (Exception, SystemExit) as failure:
        cause = (explain or describe)(failure)
        raise error(f"{what}: {cause}{f'; {advice}' if advice else ''}") from failure


def check_reference(reference: str, kind: str, error: type[ShardlineError] = ModelError) -> None:
    """Checks, without an import, that the module of an import string exists and defines the name.

    Raises `error` when the module is missing, is not Python, or evidently does not define the name.
    """
    module_name, _, name = reference.partition(":")
    _make_working_directory_importable()
    first, *others = module_name.split(".")
    spec = _find_local_module(first) or importlib.util.find_spec(first)
    for each in others:
        if spec is not None:
            # Only the last name: a namespace package would look up its parent, which is not imported.
            spec = PathFinder.find_spec(each, list(spec.submodule_search_locations or ()))
    if spec is None:
        raise error(
            f"unknown {kind} {reference!r}: no module {module_name!r}{_available_modules(module_name)}"
        )
    file = Path(spec.origin or "")
    if file.suffix != ".py":
        return
    source = file.read_text(encoding="utf-8-sig", errors="replace")
    try:
        symbols = symtable.symtable(source, file.name, "exec").get_symbols()
    except SyntaxError as failure:
        raise error(f"{kind} {reference!r}: {file} is not Python: {describe(failure)}") from None
    bound = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    if not bound & {name, "__getattr__"} and "import *" not in source:
        there = nearest(name, bound) or "nothing"
        raise error(f"unknown {kind} {reference!r}: {module_name} has no {name!r}, it has {there}")


def packages(references: Iterable[str]) -> list[str]:
    """Returns the top-level packages of import strings, sorted, without `_VERSIONED_PACKAGES`."""
    return sorted(
        {reference.partition(":")[0].partition(".")[0] for reference in references} - _VERSIONED_PACKAGES
    )


def find(package: str) -> ModuleSpec | None:
    """Returns the spec of a module, of which at most the parents are imported; None where there is none."""
    _make_working_directory_importable()
    with contextlib.suppress(ImportError, ValueError):
        return _find_local_module(package) or importlib.util.find_spec(package)
    return None


def python_files(package: str) -> Iterator[Path]:
    """Yields the files of a package, or of the directory of a top-level module, without importing it."""
    spec = find(package)
    if spec and spec.submodule_search_locations is not None:
        for location in spec.submodule_search_locations:
            yield from sorted(Path(location).rglob("*.py"))
    elif spec and spec.origin:
        yield from sorted(Path(spec.origin).parent.glob("*.py"))


def installed_version(package: str) -> str | None:
    """Returns the version of an installed package; None where it is not installed."""
    from importlib import metadata  # takes 40 ms, so not in every process

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def identify(value: Any) -> str:
    """Returns a text for a function with its arguments, or for a value, that is the same in every process.

    Arrays and long texts are identified by a checksum of their content, objects by their class, with the
    fields of a dataclass or the configuration of Keras' optimizers, losses and the like: never by an address,
    nor by a name that Keras counts up (dense_1).
    """
    if isinstance(value, functools.partial):
        named = sorted(f"{name}={identify(each)}" for name, each in value.keywords.items())
        return f"{identify(value.func)}({', '.join([*map(identify, value.args), *named])})"
    if hasattr(value, "__qualname__"):
        owner = getattr(value, "__self__", None)
        has_state = owner is not None and not isinstance(owner, type | types.ModuleType)
        of = f" of {identify(owner)}" if has_state else ""
        return f"{getattr(value, '__module__', '')}:{value.__qualname__}{of}"
    if isinstance(value, Mapping):
        items = sorted(f"{identify(name)}: {identify(each)}" for name, each in value.items())
        text = f"{{{', '.join(items)}}}"
    elif isinstance(value, list | tuple | set | frozenset):
        parts = map(identify, value)
        text = f"[{', '.join(sorted(parts) if isinstance(value, set | frozenset) else parts)}]"
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | Path):
        text = str(value) if isinstance(value, Path) else repr(value)
    elif hasattr(value, "__array__"):
        import numpy as np

        array = np.asarray(value)
        content = identify(array.tolist()).encode() if array.dtype == object else array.tobytes()
        text = repr(array.item()) if not array.ndim else f"{array.dtype}{array.shape} {_checksum(content)}"
    else:
        return f"{identify(type(value))}{_configuration(value)}"
    return text if len(text) <= _LONGEST_TEXT else _checksum(text.encode())


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _configuration(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return identify({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    with contextlib.suppress(Exception):  # the user's code runs here and may raise anything
        if hasattr(value, "weights"):  # a layer, whose configuration has names
            return ""
        return identify({name: each for name, each in value.get_config().items() if name != "name"})
    return f".{value.name}" if isinstance(value, enum.Enum) else ""


def describe(error: BaseException) -> str:
    """Returns one line with an exception of a user's code, its file and line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or isinstance(error, SyntaxError):  # a SyntaxError has its own location
        return text
    file = Path(frames[-1].filename)
    if "tensorflow" in file.parts or file.name.startswith("__autograph_generated_file"):
        return text  # AutoGraph has put the location in the user's code into the text
    return f"{text} ({file.name}, line {frames[-1].lineno})"


def _make_working_directory_importable() -> None:
    """Appends it to sys.path: its files do not shadow the standard library or installed packages."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    importlib.invalidate_caches()


def _find_local_module(name: str) -> ModuleSpec | None:
    """Returns a module of the unpacked code, else of the working directory, before any installed; or None."""
    if name in sys.modules or name in sys.stdlib_module_names:
        return None
    places = filter(None, (os.environ.get(code.VARIABLE), str(Path.cwd())))
    spec = PathFinder.find_spec(name, list(places))
    return spec if spec is not None and spec.loader is not None else None


def _load_local_module(name: str) -> None:
    spec = _find_local_module(name)
    if spec is None or spec.loader is None:
        return
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _available_modules(module_name: str) -> str:
    """Returns a clause with the modules that exist in the package of a missing one; "" for none."""
    package, _, name = module_name.rpartition(".")
    parent = sys.modules.get(package)
    path = list(getattr(parent, "__path__", ())) if package else [str(Path.cwd())]
    there = nearest(name, (module.name for module in pkgutil.iter_modules(path)))
    return f", {package or 'the working directory'} has {there}" if there else ""
