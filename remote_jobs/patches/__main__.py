"""`python remote_jobs/patches list|check|apply|revert|prepare`: the patch sets on this host, answered as one JSON line.

Run it with the interpreter of the job's steps: that is the installation it judges. Exit status 0, or 1 with
{"error": {"message", "hint"}}. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

if __package__ in {None, ""}:
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from collections.abc import Sequence
from typing import Any

from remote_jobs.patches import inplace, judge, mirror, probe
from remote_jobs.patches.sets import PatchError, PatchSet, all_sets, by_name, combined_sha256
from remote_jobs.protocol import DEFAULT_ROOT


def main(argv: Sequence[str] | None = None) -> int:
    """Answer one request; prints one JSON line."""
    args = _parser().parse_args(argv)
    try:
        answer = ACTIONS[args.action](args, all_sets(args.sets_dir))
    except (PatchError, OSError) as error:
        print(json.dumps({"error": {"message": str(error), "hint": getattr(error, "hint", "")}}))
        return 1
    print(json.dumps(answer))
    return 0


def list_sets(_args: argparse.Namespace, sets: Sequence[PatchSet]) -> dict[str, Any]:
    """Every set there is, with what it changes and why."""
    return {
        "sets": [
            {
                "name": item.name, "summary": item.summary, "package": item.package, "version": item.version,
                "partner": item.partner, "partners": list(item.partners), "sha256": item.sha256,
                "files": [file.path for file in item.files], "adds": [path for path, _ in item.adds],
                "changes": list(item.changes), "folder": item.folder,
            }
            for item in sets
        ]
    }  # fmt: skip


def check(args: argparse.Namespace, sets: Sequence[PatchSet]) -> dict[str, Any]:
    """What each set is to this installation."""
    names = set(args.sets)
    found = [judge.judge(item) for item in sets if not names or item.name in names]
    return {
        "python": sys.executable,
        "versions": {name: probe.version_of(name) for name in sorted({n for s in sets for n in (s.package, s.partner) if n})},
        "sets": [
            {
                "name": each.patch_set.name, "state": each.state, "why": each.why, "misfits": list(each.misfits),
                "sha256": each.patch_set.sha256, "in_place": inplace.applied(each.patch_set, args.root),
            }
            for each in found
        ],
    }  # fmt: skip


def prepare(args: argparse.Namespace, sets: Sequence[PatchSet]) -> dict[str, Any]:
    """Build the overlay of the sets wanted and prove it; the answer holds the variables to start the step with."""
    chosen = judge.choose(sets, _wanted(args.sets))
    built = mirror.build(chosen, args.root)
    wrong = mirror.prove(chosen, built) if built and not args.no_proof else []
    if wrong:
        raise PatchError("the patches did not take effect: " + "; ".join(wrong))
    passed = [judge.judge(item) for item in sets if item not in [each.patch_set for each in chosen]]
    return {
        "overlay": built,
        "sha256": combined_sha256([each.patch_set for each in chosen]),
        "sets": [{"name": each.patch_set.name, "sha256": each.patch_set.sha256} for each in chosen],
        "env": mirror.environment(chosen, built, dict(os.environ)),
        # A hand-made change where a set would have been used is worth a line in the log.
        "notes": [
            f"patch set {each.patch_set.name} is not used: {each.why}"
            for each in passed
            if each.state == judge.DRIFT
        ],
    }


def apply(args: argparse.Namespace, sets: Sequence[PatchSet]) -> dict[str, Any]:
    """Build the overlay (jobs find it again by its hash), or change site-packages with --in-place."""
    if not args.in_place:
        return prepare(args, sets)
    if not args.sets or args.sets == ["auto"]:
        raise PatchError(
            "--in-place changes site-packages: name the set", "orch patch apply HOST --set NAME --in-place"
        )
    chosen = judge.choose(sets, args.sets)
    return {"changed": {each.patch_set.name: inplace.apply(each, args.root) for each in chosen}}


def revert(args: argparse.Namespace, sets: Sequence[PatchSet]) -> dict[str, Any]:
    """Undo what --in-place did."""
    names: list[str] = args.sets or [item.name for item in sets if inplace.applied(item, args.root)]
    for name in names:
        by_name(sets, name)
    return {"restored": {name: inplace.revert(name, args.root) for name in names}}


ACTIONS = {"list": list_sets, "check": check, "prepare": prepare, "apply": apply, "revert": revert}


def _wanted(names: Sequence[str]) -> Any:
    if not names or list(names) == ["auto"]:
        return "auto"
    return "none" if list(names) == ["none"] else list(names)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="patches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=sorted(ACTIONS))
    parser.add_argument(
        "--root", default=DEFAULT_ROOT, help="orch's folder on this host (overlays and backups go there)"
    )
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="NAME",
        help="auto, none, or a name; repeatable",
    )
    parser.add_argument(
        "--sets-dir",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder of your own sets; repeatable",
    )
    parser.add_argument(
        "--in-place", action="store_true", help="change site-packages themselves, with backup"
    )
    parser.add_argument(
        "--no-proof", action="store_true", help="do not start an interpreter to prove the overlay"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
