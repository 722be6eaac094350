"""`{workdir}`, `{files}` and `{steps.NAME.output}` in the texts of a plan: found and checked here, replaced on the host.

All other braces stay as they are (`awk '{print $1}'`, f-strings), and so does `${workdir}`, which is the shell's.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping

from orchestrator.core.schema import suggest
from orchestrator.core.yaml import Where

REFERENCE = re.compile(r"(?<!\$)\{(workdir|files|steps\.([A-Za-z0-9][A-Za-z0-9_-]*)\.output)\}")
"""Exactly what the host replaces."""
_ALMOST = re.compile(r"(?<!\$)\{\s*(steps?)\s*\.([^{}]*)\}")
_WORD = re.compile(r"(?<!\$)\{([A-Za-z_]+)\}")


def texts_in(value: object, where: Where) -> Iterator[tuple[Where, str]]:
    """Every text inside a value, with its path."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts_in(item, (*where, str(key)))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from texts_in(item, (*where, index))


def bad_references(
    text: str, step: str, upstream: Collection[str], steps: Collection[str]
) -> Iterator[tuple[str, str | None]]:
    """What is wrong with the references of one text of a step.

    Args:
        text: as written in the plan.
        step: name of the step it belongs to.
        upstream: names of the steps that this one needs, directly or not.
        steps: names of all steps of the plan.

    Yields:
        (message, hint) for each bad reference.
    """
    for found in _ALMOST.finditer(text):
        whole, rest = found[0], found[2].strip()
        name, _, attribute = rest.rpartition(".")
        if found[1] == "step" or not name or attribute != "output":
            meant = name or rest
            right = f"{{steps.{meant if meant in steps else '<name>'}.output}}"
            yield f"{whole} is not a reference", f"did you mean {right}?"
        elif name not in steps:
            yield f"{whole}: no step is called {name!r}", suggest(name, steps, "steps")
        elif name == step:
            yield f"{whole}: a step cannot refer to its own output", None
        elif name not in upstream:
            yield f"{whole}: {step!r} does not wait for {name!r}", f"add needs: [{name}] to the step {step}"
        elif not REFERENCE.fullmatch(whole):
            yield f"{whole} is not a reference", f"write {{steps.{name}.output}} without spaces"


def doubtful_words(text: str) -> Iterator[str]:
    """Braces that stay as they are, but look like a slip of `{workdir}` or `{files}`."""
    for found in _WORD.finditer(text):
        word = found[1]
        alike = difflib.get_close_matches(
            word.lower().replace("_", ""), ["workdir", "files"], n=1, cutoff=0.85
        )
        if alike and word != alike[0]:
            yield f"{{{word}}} stays as it is; did you mean {{{alike[0]}}}?"
