"""Terraform modules, read and checked against the provider's schema in terraform_schema.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import hcl2
from hcl2.utils import SerializationOptions

from tests.helpers.terraform_schema import FILE

#: Blocks by their address: google_storage_bucket.pipelines, var.region, output.settings, provider.google.
Module = dict[str, dict[str, Any]]

SCHEMA: Mapping[str, Any] = json.loads(FILE.read_text())["resources"]
_OPTIONS = SerializationOptions(with_comments=False, strip_string_quotes=True)
_META = {"count", "for_each", "depends_on", "lifecycle", "provider"}
_BLOCK = "__is_block__"
#: A variable, a resource with its index and attribute, or the element of a for_each.
_REFERENCE = re.compile(
    r"\b(?:(?P<var>var\.\w+)|(?P<resource>google_\w+\.\w+)(?P<index>\[[^\]]+\])?(?:\.(?P<attribute>\w+))?"
    r"|(?P<each>each\.(?:key|value)))"
)
_VALUES = {"bool": bool, "number": (int, float), "string": str, "list": list, "map": dict}


def read(directory: Path) -> Module:
    """Returns the blocks of all .tf files of a directory."""
    module: Module = {}
    for file in sorted(directory.glob("*.tf")):
        content = hcl2.loads(file.read_text(), serialization_options=_OPTIONS)
        for kind, blocks in content.items():
            for block in blocks:
                for address, body in _addressed(kind, block):
                    assert address not in module, f"{address} is there twice"
                    module[address] = body
    return module


def resources(module: Module) -> Module:
    """Returns the resources of a module."""
    return {address: body for address, body in module.items() if address.startswith("google_")}


def faults(module: Module) -> list[str]:
    """Returns what the provider's schema or Terraform would refuse, each with the address of its block."""
    found = []
    for address, body in resources(module).items():
        kind = address.partition(".")[0]
        if kind not in SCHEMA:
            found.append(f"{address}: there is no resource {kind}")
            continue
        found += [f"{address}: {text}" for text in _body(body, SCHEMA[kind]["arguments"], _META)]
    for address, body in module.items():
        found += [f"{address}: {text}" for text in _references(body, module)]
    used = {match["var"] for body in module.values() for match in _matches(body)}
    unused = {address for address in module if address.startswith("var.")} - used
    return found + [f"{address}: nothing uses it" for address in sorted(unused)]


def grants(module: Module) -> set[tuple[str, str, str]]:
    """Returns who has which role on what: ("trainer", "roles/storage.objectUser", "storage_bucket").

    A resource grants each role of its text to each account of its text; `submitters` is one account.
    """
    found = set()
    for address, body in resources(module).items():
        if scope := re.fullmatch(r"google_(\w+)_iam_member", address.partition(".")[0]):
            text = json.dumps([body.get(key) for key in ("role", "member", "for_each")])
            accounts = {
                match["resource"].partition(".")[2]
                for match in _REFERENCE.finditer(text)
                if match["attribute"] == "member"
            }
            if "var.submitters" in text:
                accounts.add("submitters")
            found |= {
                (account, role, scope[1])
                for account, role in product(accounts, re.findall(r"roles/[\w.]+", text))
            }
    return found


def render(template: str, values: Mapping[str, Any]) -> str:
    """Returns the text of a heredoc whose expressions have these values; KeyError for any other expression.

    It knows `${EXPRESSION}` and lines `%{if EXPRESSION~}` to `%{endif~}`, which do not nest.
    """
    text = re.sub(r"^<<EOT\n|EOT$", "", template.strip())
    text = re.sub(
        r"%\{if (.+?)~\}\n(.*?)%\{endif~\}\n",
        lambda match: match[2] if values[match[1]] else "",
        text,
        flags=re.DOTALL,
    )
    return re.sub(r"\$\{(.+?)\}", lambda match: str(values[match[1]]), text)


def _addressed(kind: str, block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the address and the body of a block at the top of a file."""
    prefix = {"resource": "", "variable": "var."}.get(kind, f"{kind}.")
    if kind in ("terraform", "locals"):
        yield kind, block
        return
    for label, body in block.items():
        if label == _BLOCK:
            continue
        if kind == "resource":
            ((name, body),) = ((name, item) for name, item in body.items() if name != _BLOCK)
            label = f"{label}.{name}"
        yield f"{prefix}{label}", body


def _body(
    body: Mapping[str, Any], schema: Mapping[str, Any], meta: set[str], where: str = ""
) -> Iterator[str]:
    """Yields what is wrong with the arguments and blocks of a block."""
    items: dict[str, list[Any]] = {
        name: [*value] if _is_block(value) else [value]
        for name, value in body.items()
        if name not in (*meta, _BLOCK, "dynamic")
    }
    for dynamic in body.get("dynamic", ()):
        for name, block in dynamic.items():
            items.setdefault(name, []).extend(block["content"])
    for name, kind in schema.items():
        needed = (kind if isinstance(kind, str) else kind[0]).endswith(" required")
        if needed and name not in items:
            yield f"{where}{name} is missing"
    for name, values in items.items():
        kind = schema.get(name)
        if kind is None:
            yield f"{where}{name} is unknown"
        elif isinstance(kind, str):
            yield from _argument(values, kind, f"{where}{name}")
        elif not _is_block(values):
            yield f"{where}{name} is a block"
        else:
            if len(values) > 1 and kind[0].startswith("one"):
                yield f"{where}{name} is there {len(values)} times"
            for value in values:
                yield from _body(value, kind[1], set(), f"{where}{name}.")


def _argument(values: list[Any], kind: str, where: str) -> Iterator[str]:
    """Yields what is wrong with a value; an expression may be of any type."""
    value, wanted = values[0], kind.split()[0]
    if _is_block(values):
        yield f"{where} is no block"
    elif isinstance(value, str) and re.search(r"[$%]\{", value):
        return
    elif not isinstance(value, _VALUES[wanted]) or isinstance(value, bool) != (wanted == "bool"):
        yield f"{where} is {value!r}, no {wanted}"


def _is_block(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and _BLOCK in value[0]


def _references(body: Mapping[str, Any], module: Module) -> Iterator[str]:
    """Yields the references of a block to what is not there."""
    whole = set(body.get("depends_on", ()))
    for match in _matches(body):
        name, attribute = match["resource"], match["attribute"]
        if match["each"] and "for_each" not in body:
            yield f"{match['each']} without for_each"
        elif match["var"] and match["var"] not in module:
            yield f"{match['var']} is not there"
        elif name and name not in module:
            yield f"{name} is not there"
        elif name and f"${{{match[0]}}}" not in whole:
            several = {"count", "for_each"} & module[name].keys()
            if bool(several) != bool(match["index"]):
                yield f"{match[0]} {'lacks an' if several else 'has no'} index"
            if attribute not in SCHEMA.get(name.partition(".")[0], {}).get("attributes", ()):
                yield f"{name} has no attribute {attribute}"


def _matches(value: Any) -> Iterator[re.Match[str]]:
    """Yields the references in all expressions of a value."""
    if isinstance(value, str):
        for expression in re.findall(r"[$%]\{(?:[^{}]|\{[^{}]*\})*\}", value):
            yield from _REFERENCE.finditer(expression)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _matches(item)
    elif isinstance(value, list):
        for item in value:
            yield from _matches(item)
