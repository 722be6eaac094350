"""Put patch sets in force for this very process and its children: what a step does when it is run without orch.

Under orch the supervisor has done it already (ORCH_PATCHES is set) and this returns at once. Standard library only.
"""

from __future__ import annotations

import os
import sys

from remote_jobs.patches import judge, mirror
from remote_jobs.patches.sets import all_sets
from remote_jobs.protocol import DEFAULT_ROOT

ROOT_ENV = "ORCH_ROOT"
CHOICE_ENV = "ORCH_PATCHES"


def activate(wanted: str = "auto", root: str | None = None) -> list[str]:
    """Build the overlay of the sets that suit and put it first on sys.path and PYTHONPATH; returns their names.

    Must run before the patched packages are imported.

    Raises:
        PatchError: a set asked for by name does not suit.
    """
    if CHOICE_ENV in os.environ:
        named = [
            word.split("@")[0] for word in os.environ[CHOICE_ENV].split(",")
        ]  # name@hash, as the attempt records it
        return [name for name in named if name not in ("", "none")]
    names = "auto" if wanted == "auto" else [name for name in wanted.split(",") if name and name != "none"]
    chosen = judge.choose(all_sets(), names)
    built = mirror.build(chosen, root or os.environ.get(ROOT_ENV) or DEFAULT_ROOT)
    if built is not None:
        os.environ.update(mirror.environment(chosen, built, dict(os.environ)))
        sys.path.insert(0, built)
    return [found.patch_set.name for found in chosen]
