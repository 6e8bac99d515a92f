"""Bill of materials (SBOM) of the image: `python -m shardline.pipelines.image.sbom FILE REVISION`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

#: Where it lies in the image.
PLACE = "/opt/shardline/sbom.json"


def bill(revision: str) -> dict[str, Any]:
    """Returns what is installed here as a CycloneDX document: distributions of Python, and Debian packages.

    Args:
        revision: Git revision of the code that the image was built for; "" where none is known.
    """
    components = sorted([*_distributions(), *_debian()], key=lambda component: str(component["purl"]).lower())
    revisions = [{"name": "org.opencontainers.image.revision", "value": revision}] if revision else []
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "name": "shardline", "version": metadata.version("shardline")},
            "properties": [{"name": "python", "value": sys.version.split()[0]}, *revisions],
        },
        "components": components,
    }


def _distributions() -> Iterator[dict[str, Any]]:
    for found in {item.metadata["Name"].lower(): item for item in metadata.distributions()}.values():
        name = found.metadata["Name"]
        component = _component("pypi", name.lower().replace("_", "-"), name, found.version)
        # An expression of SPDX, or the text that the package has instead.
        described = found.metadata.json
        spdx, text = described.get("license_expression"), str(described.get("license", ""))
        if spdx:
            component["licenses"] = [{"expression": spdx}]
        elif text and "\n" not in text:
            component["licenses"] = [{"license": {"name": text}}]
        yield component


def _debian() -> Iterator[dict[str, Any]]:
    command = ["dpkg-query", "--show", "--showformat", "${Package} ${Version}\\n"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return  # a base that is no Debian
    for line in listed.splitlines():
        name, _, version = line.partition(" ")
        yield _component("deb/debian", name, name, version)


def _component(kind: str, key: str, name: str, version: str) -> dict[str, Any]:
    # As package-url/purl-spec has it: a plus and an epoch's colon are written in percent.
    purl = f"pkg:{kind}/{quote(key)}@{quote(version)}"
    return {"type": "library", "name": name, "version": version, "purl": purl}


if __name__ == "__main__":
    file, revision = Path(sys.argv[1]), sys.argv[2]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(bill(revision), indent=2) + "\n", encoding="utf-8")
