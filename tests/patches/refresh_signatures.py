"""Write data/signatures.json: what every supported vLLM wheel offers at the places that the patch sets touch.

    python -m tests.patches.refresh_signatures

Downloads 0.5 GB a version (cached). The result is committed, so that a set that stops fitting a version is seen without
downloading; one version is checked against the real wheel in the tests, the others here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from remote_jobs.patches import judge, probe, sets
from tests.patches.wheels import installation, unpacked
from tests.vllm_env.build import cache_dir

VERSIONS = ("0.11.0", "0.12.0", "0.13.0", "0.14.0", "0.15.0", "0.16.0")
LEGACY = {"speculators-0.3.0-vllm-0.12-0.16": "0.3.0", "speculators-0.4.0-vllm-0.16": "0.4.0"}
FILE = Path(__file__).parent / "data" / "signatures.json"


def places() -> list[str]:
    """Every signature that the sets' calls and probes name."""
    found = {call["signature"] for item in sets.all_sets() if item.name in LEGACY for call in item.calls}
    for item in sets.all_sets():
        if item.name in LEGACY:
            found |= {
                each[key]
                for each in item.requires
                for key in ("signature", "fields", "defines")
                if key in each
            }
    return sorted(found)


def describe(version: str) -> dict[str, Any]:
    """Signatures of one vLLM, and what each legacy set is to it."""
    vllm = unpacked("vllm", version)
    signatures: dict[str, Any] = {}
    for where in places():
        try:
            signatures[where] = probe.describe(str(vllm), where)
        except probe.Missing as error:
            signatures[where] = {"missing": str(error)}
    verdicts = {}
    for name, speculators in LEGACY.items():
        folder = cache_dir() / "wheels" / f"pair-{version}-{speculators}"
        if not folder.is_dir():
            installation(folder, vllm, unpacked("speculators", speculators))
        verdicts[name] = judge.judge(sets.by_name(sets.all_sets(), name), str(folder), speculators).state
    return {"signatures": signatures, "verdicts": verdicts}


def main() -> None:
    """Refresh the file."""
    FILE.write_text(
        json.dumps({version: describe(version) for version in VERSIONS}, indent=1, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    main()
