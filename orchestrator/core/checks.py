"""What must fit together in a plan, beyond the shape of each value: names, needs, parameters, references, files.

Works on the plan as read, since the models exist only when every shape is right and all problems of a file are to be
shown at once. So every function here takes any garbage in its stride and leaves shapes to orchestrator.core.plan.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import Problem
from orchestrator.core.files import BadEntry, LocalFile, collisions, expand
from orchestrator.core.graph import find_cycle, upstream
from orchestrator.core.inputs import missing_inputs
from orchestrator.core.references import REFERENCE, bad_references, doubtful_words, texts_in
from orchestrator.core.retry import check_retry
from orchestrator.core.schema import check, dotted, nearest, suggest
from orchestrator.core.split import COUNT_ENV, INDEX_ENV, MAX_NAME, SPLITTABLE, range_name
from orchestrator.core.steps import BUILTIN, unknown_parameter
from orchestrator.core.yaml import Document, Where

if TYPE_CHECKING:
    from orchestrator.core.plan import Plan

ONE_OF_TWO = "write either run: COMMAND or uses: " + " | ".join(BUILTIN)


@dataclass
class Context:
    """What the checks read, and what they find on the way."""

    document: Document
    raw: Mapping[str, Any]
    base_dir: Path
    files: list[LocalFile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[tuple[Where, dict[str, Any]]]:
        """(path, step) of every step that is a mapping."""
        steps = self.raw.get("steps")
        listed = steps if isinstance(steps, list) else []
        return [(("steps", i), step) for i, step in enumerate(listed) if isinstance(step, dict)]

    @property
    def needs(self) -> dict[str, list[str]]:
        """Step -> needs, as far as they are names of steps."""
        names = {step["name"] for _, step in self.steps if isinstance(step.get("name"), str)}
        return {
            step["name"]: [need for need in texts_of(step.get("needs")) if need in names]
            for _, step in self.steps
            if isinstance(step.get("name"), str)
        }


def texts_of(value: Any) -> list[str]:
    """The texts of a list, or of one text."""
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, str)]


def called(step: Mapping[str, Any], where: Where) -> str:
    """The step's name in messages."""
    name = step.get("name")
    return name if isinstance(name, str) and name else f"number {int(where[1]) + 1}"


def _naming(step: Mapping[str, Any], where: Where) -> Callable[[Where], str]:
    """How values inside a step are called: ``extract.with.layers``."""
    shown = called(step, where)
    return lambda path: f"{shown}.{dotted(path[2:])}" if path[2:] else f"step {shown}"


def misplaced_keys(
    document: Document, raw: Mapping[str, Any], plan_keys: tuple[str, ...], step_keys: tuple[str, ...]
) -> tuple[list[Problem], dict[str, Any]]:
    """Right keys in the wrong place, and the plan without them."""
    problems = []
    cleaned = dict(raw)
    for key in [key for key in raw if key not in plan_keys and key in step_keys]:
        problems.append(
            document.problem((key,), f"{key!r} belongs inside a step", "move it under one of the steps")
        )
        del cleaned[key]
    if isinstance(raw.get("steps"), list):
        cleaned["steps"] = list(raw["steps"])
        for where, step in Context(document, raw, Path()).steps:
            uses = step.get("uses")
            own = BUILTIN[uses].names() if isinstance(uses, str) and uses in BUILTIN else []
            inside = [key for key in step if key not in step_keys and key in own]
            outside = [key for key in step if key not in step_keys and key in plan_keys and key not in own]
            for key in inside:
                message = f"unknown key {key!r} in step {called(step, where)}"
                problems.append(
                    document.problem((*where, key), message, f"it goes under with: {{{key}: ...}}")
                )
            for key in outside:
                message = f"{key!r} belongs to the plan, not to step {called(step, where)}"
                problems.append(document.problem((*where, key), message, "move it to the top level"))
            cleaned["steps"][where[1]] = {
                k: v for k, v in step.items() if k not in inside and k not in outside
            }
    return problems, cleaned


def check_plan(context: Context) -> Iterator[Problem]:
    """Everything that can be said without the models."""
    yield from _names_and_needs(context)
    needs = context.needs
    for where, step in context.steps:
        yield from _kind(context, where, step)
        yield from _params(context, where, step)
        yield from _done(context, where, step)
        yield from _service(context, where, step)
        yield from _split(context, where, step)
        yield from _files(context, where, step)
        yield from check_retry(context.document, (*where, "retry"), step, _naming(step, where))
        yield from _references(context, where, step, needs)
    for first, second in collisions(context.files):
        message = f"two different files would both land as {first.name!r}: {first.path} and {second.path}"
        yield context.document.problem(
            ("steps",), message, "rename one: all files: of a plan share one folder"
        )


def check_inputs(context: Context, plan: Plan) -> Iterator[Problem]:
    """Parameters that a built-in step needs and nothing gives it."""
    for step, name, hint in missing_inputs(plan):
        place = next(where for where, raw in context.steps if raw.get("name") == step.name)
        yield context.document.problem(place, f"step {step.name} ({step.uses}) has no {name}", hint)


def _names_and_needs(context: Context) -> Iterator[Problem]:
    problem, needs = context.document.problem, context.needs
    first: dict[str, Where] = {}
    for where, step in context.steps:
        name = step.get("name")
        if not isinstance(name, str):
            continue
        if name in first:
            line = context.document.line((*first[name], "name"))
            yield problem(
                (*where, "name"), f"a second step is called {name!r}, first on line {line}", "rename one"
            )
        first.setdefault(name, where)
        seen = set()
        for need in texts_of(step.get("needs")):
            at = (*where, "needs")
            if need == name:
                yield problem(at, f"step {name} needs itself", "remove it from its needs")
            elif need not in needs:
                yield problem(at, f"{name}.needs: no step is called {need!r}", suggest(need, needs, "steps"))
            elif need in seen:
                yield problem(at, f"{name}.needs: {need!r} is listed twice", "remove one")
            seen.add(need)
    cycle = find_cycle({name: [need for need in wanted if need != name] for name, wanted in needs.items()})
    if cycle:
        shown = " -> ".join(cycle)
        yield problem(
            (*first[cycle[0]], "needs"), f"steps wait for each other: {shown}", "remove one of these needs"
        )


def _kind(context: Context, where: Where, step: Mapping[str, Any]) -> Iterator[Problem]:
    problem, shown = context.document.problem, called(step, where)
    uses, run = step.get("uses"), step.get("run")
    if "uses" in step and "run" in step:
        yield problem((*where, "run"), f"step {shown} has both run and uses", ONE_OF_TWO)
    elif not {"uses", "run"} & {
        nearest(key, ("run", "uses", "with", "needs")) for key in step
    }:  # `rnu` is told apart
        yield problem(where, f"step {shown} has neither run nor uses", ONE_OF_TWO)
    if isinstance(uses, str) and uses not in BUILTIN:
        hint = suggest(uses, BUILTIN)
        yield problem((*where, "uses"), f"{shown}.uses: there is no built-in step {uses!r}", hint)
    if isinstance(run, str) and not run.strip():
        yield problem((*where, "run"), f"{shown}.run is empty", "write a command")
    if "uses" not in step and "with" in step:
        hint = "write the flags into run:, or values into env:"
        yield problem((*where, "with"), f"step {shown}: with: is for built-in steps (uses:)", hint)
    output, param = (
        step.get("output"),
        step["with"].get("output") if isinstance(step.get("with"), dict) else None,
    )
    if output is not None and param is not None and output != param:
        yield problem(
            (*where, "output"), f"step {shown} has two outputs: {output!r} and {param!r}", "keep with.output"
        )


def _params(context: Context, where: Where, step: Mapping[str, Any]) -> Iterator[Problem]:
    uses, given, shown = step.get("uses"), step.get("with"), called(step, where)
    if not isinstance(uses, str) or uses not in BUILTIN or not isinstance(given, dict):
        return
    at = (*where, "with")
    builtin = BUILTIN[uses]
    _, problems = check(
        builtin.params,
        context.document,
        given,
        at,
        lambda path: f"{shown}.{dotted(path[2:])}" if path[2:] else shown,
    )
    yield from problems
    for key in given:
        found = None if key in builtin.names() else unknown_parameter(uses, key)
        if found:
            yield context.document.problem((*at, key), f"{shown}.with: {found[0]}", found[1])
    yield from _sizes(context, where, step, given)


def _sizes(
    context: Context, where: Where, step: Mapping[str, Any], given: Mapping[str, Any]
) -> Iterator[Problem]:
    gpus = step.get("gpus")
    sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nproc_per_node")
    product, parts = 1, []
    for key in sizes:
        value = given.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            product *= value
            parts.append(f"{key} {value}")
    if isinstance(gpus, int) and not isinstance(gpus, bool) and 0 < gpus < product:
        message = f"step {called(step, where)} has gpus: {gpus}, but {' x '.join(parts)} needs {product}"
        yield context.document.problem((*where, "gpus"), message, f"write gpus: {product}, or leave gpus out")


def _done(context: Context, where: Where, step: Mapping[str, Any]) -> Iterator[Problem]:
    done, shown, at = step.get("done"), called(step, where), (*where, "done")
    if not isinstance(done, dict):
        return
    problem = context.document.problem
    if len({"equals", "at_least"} & set(done)) != 1:
        how = (
            "both equals and at_least"
            if "equals" in done and "at_least" in done
            else "neither equals nor at_least"
        )
        yield problem(
            at,
            f"{shown}.done has {how}",
            "write one: {count: PATTERN, equals: N} or {count: ..., at_least: N}",
        )
    pattern = done.get("count")
    if isinstance(pattern, str) and pattern:
        reason = bad_glob(pattern)
        if reason:
            hint = "a pattern such as out/*.safetensors or out/**/hs_[0-9]*.bin"
            yield problem(
                (*at, "count"), f"{shown}.done.count: {pattern!r} is not a file pattern: {reason}", hint
            )


def bad_glob(pattern: str) -> str | None:
    """Why a text is no usable file pattern, or None."""
    text = REFERENCE.sub("x", pattern)
    if "\n" in text or "\r" in text:
        return "it has a line break"
    if text.strip() in {"", ".", "/", ".."} or text.endswith("/"):
        return "it names a folder, not files"
    rest = re.sub(r"\[!?\]?[^\]]*\]", "x", text)  # complete [...] groups
    if "[" in rest:
        return "a [ is not closed"
    if re.search(r"\{[^{}]*,[^{}]*\}", rest):
        return "{a,b} is the shell's, not a file pattern's"
    return None


def _service(context: Context, where: Where, step: Mapping[str, Any]) -> Iterator[Problem]:
    service, shown, at = step.get("service"), called(step, where), (*where, "service")
    if not isinstance(service, dict):
        return
    problem, uses = context.document.problem, step.get("uses")
    forms = "ready: {http: URL}, ready: {port: N} or ready: {log: TEXT}"
    if uses is not None and uses != "serve":
        yield problem(at, f"step {shown} uses {uses}, which is not a service", "remove service:")
    ready = service.get("ready")
    if ready is None:
        if uses is None:
            yield problem(at, f"{shown}.service does not say when it is ready", f"add {forms}")
        return
    if not isinstance(ready, dict):
        return
    if len({"http", "port", "log"} & set(ready)) != 1:
        yield problem((*at, "ready"), f"{shown}.service.ready must have exactly one way", f"write {forms}")
    url = ready.get("http")
    if isinstance(url, str) and not re.match(r"https?://[^\s/]+", url):
        hint = "write http://127.0.0.1:8000/health"
        yield problem((*at, "ready", "http"), f"{shown}.service.ready.http: {url!r} is not a URL", hint)
    if step.get("done") is not None:
        yield problem((*where, "done"), f"step {shown} is a service, so done: is never asked", "remove done:")


def _split(context: Context, where: Where, step: Mapping[str, Any]) -> Iterator[Problem]:
    """A split step must be one that can do a range of its work, and its ranges need names of their own."""
    given, name, at = step.get("split"), called(step, where), (*where, "split")
    ranges = given.get("ranges", 1) if isinstance(given, dict) else given
    if not isinstance(ranges, int) or isinstance(ranges, bool):
        return
    problem, uses = context.document.problem, step.get("uses")
    hosts = texts_of(given.get("hosts")) if isinstance(given, dict) else []
    if isinstance(given, dict) and "ranges" not in given:
        yield problem(at, f"{name}.split does not say how many ranges", "write {ranges: 4, hosts: [a, b]}")
    elif hosts and ranges < len(hosts):
        yield problem(
            at, f"{name}.split has {ranges} ranges for {len(hosts)} hosts", f"write ranges: {len(hosts)}"
        )
    if len(set(hosts)) < len(hosts):
        yield problem(
            at, f"{name}.split.hosts names a host twice", "name each host once; ranges says how many ranges"
        )
    if hosts and len(context.steps) > 1:
        yield problem(
            at,
            f"{name} is split over hosts, and the plan has other steps: they cannot wait for jobs on other hosts",
            "put this step into a plan of its own, with the files that it reads on every host",
        )
    if hosts and context.raw.get("host") is not None:
        yield problem(("host",), f"the plan names a host, and {name}.split names hosts", "remove host:")
    if ranges < 2:
        return
    if isinstance(uses, str) and uses in BUILTIN and uses != SPLITTABLE:
        hint = (
            f"remove split:; it is for {SPLITTABLE}, and for run steps that read {INDEX_ENV} and {COUNT_ENV}"
        )
        yield problem(at, f"step {name} uses {uses}, which has no ranges", hint)
    if step.get("service") is not None:
        yield problem(at, f"step {name} is a service, which has no ranges", "remove split:")
    last = range_name(name, ranges, ranges)
    if len(last) > MAX_NAME:
        yield problem(
            (*where, "name"), f"{name!r} is too long a name for a split step", f"its ranges are called {last}"
        )
    own = re.compile(rf"{re.escape(name)}-[1-9]\d*of{ranges}")
    for other in context.needs:
        if own.fullmatch(other):
            yield problem(
                at, f"the ranges of {name} are called like the step {other}", f"rename the step {other}"
            )


def _files(context: Context, where: Where, step: Mapping[str, Any]) -> Iterator[Problem]:
    for index, entry in enumerate(texts_of(step.get("files"))):
        try:
            context.files += expand(entry, context.base_dir)
        except BadEntry as error:
            place = (*where, "files", index) if isinstance(step["files"], list) else (*where, "files")
            yield context.document.problem(place, f"{called(step, where)}.files: {error.message}", error.hint)


def _references(
    context: Context, where: Where, step: Mapping[str, Any], needs: Mapping[str, list[str]]
) -> Iterator[Problem]:
    name = called(step, where)
    before = upstream(needs, name)
    for key in ("run", "with", "env", "done", "output", "service"):
        for place, text in texts_in(step.get(key), (*where, key)):
            for message, hint in bad_references(text, name, before, list(needs)):
                yield context.document.problem(place, f"{name}.{dotted(place[2:])}: {message}", hint)
            line = context.document.line(place)
            context.warnings += [f"{context.document.name}:{line}: {words}" for words in doubtful_words(text)]
