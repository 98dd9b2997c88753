"""The schemas of KubeRay's resources, by `kuberay.json` beside this.

python -m tests.deploy.schemas <ray.io_raycronjobs.yaml> <version>

makes that anew from the operator's CRD (ray-operator/config/crd/bases), of which a RayJob's is a part: without
descriptions, with equal parts once, and refusing what the operator would drop without a word, an unknown property.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

_FILE = Path(__file__).with_name("kuberay.json")
_ANYTHING = "x-kubernetes-preserve-unknown-fields"
_KEPT = ("type", "properties", "items", "required", "enum", "additionalProperties", "anyOf", "pattern", "minimum",
         "maximum", "maxLength", "minLength", "minItems", "maxItems", _ANYTHING)  # fmt: skip
_LARGE = 200  # characters, from which on a part that comes twice is written once
_NOTE = "From the CRD of ray-project/kuberay {}, Apache License 2.0; tests/deploy/schemas.py says what is changed."


def schema(kind: str) -> dict[str, Any]:
    """The JSON schema of a kind, as `RayJob`."""
    cron_job: dict[str, Any] = json.loads(_FILE.read_text())
    if kind == "RayCronJob":
        return cron_job
    assert kind == "RayJob"
    spec = cron_job["properties"]["spec"]["properties"]["jobTemplate"]
    return {**cron_job, "properties": {**cron_job["properties"], "spec": spec}}


def trimmed(node: Any) -> Any:
    """An OpenAPI schema as a strict JSON schema."""
    if not isinstance(node, dict):
        return node
    kept = {key: value for key, value in node.items() if key in _KEPT}
    if "properties" in kept:
        kept["properties"] = {name: trimmed(value) for name, value in kept["properties"].items()}
        if not kept.pop(_ANYTHING, False):
            kept["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if key in kept:
            kept[key] = trimmed(kept[key])
    if "anyOf" in kept:
        kept["anyOf"] = [trimmed(value) for value in kept["anyOf"]]
    return kept


def shared(whole: dict[str, Any]) -> dict[str, Any]:
    """The same, with what comes several times in `$defs`."""
    seen: Counter[str] = Counter()

    def count(node: Any) -> None:
        if isinstance(node, dict):
            text = json.dumps(node, sort_keys=True)
            seen[text] += 1
            if seen[text] == 1:
                for value in node.values():
                    count(value)
        elif isinstance(node, list):
            for value in node:
                count(value)

    count(whole)
    names: dict[str, str] = {}
    definitions: dict[str, Any] = {}

    def refer(node: Any) -> Any:
        if isinstance(node, list):
            return [refer(value) for value in node]
        if not isinstance(node, dict):
            return node
        text = json.dumps(node, sort_keys=True)
        if seen[text] > 1 and len(text) > _LARGE and "type" in node:
            if text not in names:
                names[text] = f"d{len(names)}"
                definitions[names[text]] = {key: refer(value) for key, value in node.items()}
            return {"$ref": f"#/$defs/{names[text]}"}
        return {key: refer(value) for key, value in node.items()}

    return {**refer(whole), "$defs": definitions}


def main() -> None:
    crd = yaml.load(Path(sys.argv[1]).read_text(), Loader=yaml.CSafeLoader)
    (served,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
    whole = trimmed(served["schema"]["openAPIV3Schema"])
    whole["properties"]["metadata"] = {"type": "object"}
    content = {"$comment": _NOTE.format(sys.argv[2]), **shared(whole)}
    _FILE.write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
