"""The schema of Terraform's Google provider: its part that the module of `shardline new --terraform` uses.

terraform_schema.json is written from the wheel of a package whose classes HashiCorp generated from the
provider's own schema. To renew it, for another resource or release:

    pip download --no-deps cdktf-cdktf-provider-google==16.12.1
    python -m tests.helpers.terraform_schema cdktf_cdktf_provider_google-16.12.1-py3-none-any.whl

An argument is "TYPE" or "TYPE required"; a nested block is a list of how often it may be there ("one" or
"many", and "required") and of its arguments; `attributes` are what other resources may refer to besides.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

FILE = Path(__file__).with_suffix(".json")
_PACKAGE = "cdktf_cdktf_provider_google"
#: What the module uses: a module of the package for each.
_RESOURCES = (
    "artifact_registry_repository",
    "artifact_registry_repository_iam_member",
    "project_iam_member",
    "project_service",
    "pubsub_topic",
    "pubsub_topic_iam_member",
    "secret_manager_secret",
    "secret_manager_secret_iam_member",
    "service_account",
    "service_account_iam_member",
    "storage_bucket",
    "storage_bucket_iam_member",
)
_TYPES = {"str": "string", "bool": "bool", "Number": "number"}


class _Module:
    """The classes of one resource."""

    def __init__(self, text: str) -> None:
        tree = ast.parse(text)
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.resource = next(iter(self.classes))
        self.provider = re.findall(r"/hashicorp/google/([\d.]+)/", text)[0]

    def arguments(self, name: str) -> dict[str, Any]:
        """Returns the arguments and blocks of a class, which its constructor takes by keyword."""
        init = next(node for node in self.classes[name].body if getattr(node, "name", "") == "__init__")
        assert isinstance(init, ast.FunctionDef)
        pairs = zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True)
        left_out = _META if name == self.resource else ()
        return {
            argument.arg: self._kind(ast.unparse(argument.annotation), required=default is None)
            for argument, default in pairs
            if argument.annotation and argument.arg not in left_out
        }

    def attributes(self) -> list[str]:
        """Returns what the resource exports, arguments included."""
        return [
            node.name
            for node in self.classes[self.resource].body
            if isinstance(node, ast.FunctionDef)
            and any(ast.unparse(item) == "builtins.property" for item in node.decorator_list)
            and not node.name.endswith("_input")
            and ast.unparse(node.returns or ast.Constant("")) in ("builtins.str", "jsii.Number")
        ]

    def _kind(self, annotation: str, *, required: bool) -> Any:
        end = " required" if required else ""
        many = "typing.Sequence[" in annotation
        if named := re.search(rf"['\"]({self.resource}\w+)['\"]", annotation):
            return [("many" if many else "one") + end, self.arguments(named[1])]
        found = re.search(r"(?:builtins|jsii)\.(str|bool|Number)", annotation.partition("typing.Mapping[")[0])
        kind = _TYPES[found[1]] if found else "map"
        return (f"list of {kind}" if many else kind) + end


#: Terraform's own arguments, which every resource has, and those that this module sets nowhere.
_META = (
    *("connection", "count", "depends_on", "for_each", "lifecycle", "provider", "provisioners"),
    *("id", "timeouts"),
)


def extract(wheel: Path) -> dict[str, Any]:
    """Returns the schema of the resources in the package's wheel."""
    with ZipFile(wheel) as archive:
        texts = {name: archive.read(f"{_PACKAGE}/{name}/__init__.py").decode() for name in _RESOURCES}
    modules = {f"google_{name}": _Module(text) for name, text in texts.items()}
    (provider,) = {module.provider for module in modules.values()}
    return {
        "source": "-".join(wheel.name.split("-")[:2]),
        "provider": f"hashicorp/google {provider}",
        "resources": {
            name: {"arguments": module.arguments(module.resource), "attributes": module.attributes()}
            for name, module in modules.items()
        },
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(extract(Path(sys.argv[1])), indent=1) + "\n")
