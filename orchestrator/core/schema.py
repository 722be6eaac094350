"""From a YAML document to a pydantic model, with errors that people can act on.

pydantic finds what is wrong; this file says it in the words of the person who wrote the file: which file and line,
what was seen, what is allowed, and the nearest right spelling. It also holds the field types that plan and inventory
share (durations, sizes, environment variables). Must not import plan or inventory.
"""

from __future__ import annotations

import difflib
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from orchestrator.core.errors import Problem
from orchestrator.core.yaml import Document, Where

M = TypeVar("M", bound="Strict")


class Strict(BaseModel):
    """Base of all models read from YAML: no unknown keys, no silent conversions ("8" is not 8, yes is not true)."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        defer_build=True,  # most commands use few of the models: their start is 50 ms quicker
    )


def wrong(message: str, hint: str | None = None) -> PydanticCustomError:
    """An error to raise inside a validator; ``hint`` says what to write instead."""
    # As a value, and the last one: pydantic has no way to write a brace in a template, and fills in values in turn.
    return PydanticCustomError("orch", "{message}", {"hint": hint, "message": message})


# --------------------------------------------------------------------------------------------------------- field types

_UNITS_S = {"ms": 0.001, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|sec|min|s|m|h|d)\s*")
MAX_DURATION_S = 366 * 86400.0


def duration_s(value: Any) -> float:
    """Seconds of ``90``, ``"90s"``, ``"30m"``, ``"1h30m"`` or ``"2d"``."""
    if isinstance(value, str):
        text = value.strip().lower()
        parts = _DURATION.findall(text)
        if not parts or _DURATION.sub("", text):
            raise wrong(f"must be a time, not {value!r}", "write seconds, or 90s, 30m, 1h30m, 2d")
        value = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(f"must be a time, not {_show(value)}", "write seconds, or 90s, 30m, 1h30m, 2d")
    if not 0 <= value <= MAX_DURATION_S:
        raise wrong(f"must be between 0 and 366 days, not {value:g} s")
    return float(value)


_SIZES = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_SIZES.update({"kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4})
_SIZES.update({"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40})
_SIZES.update({"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40})


def size_bytes(value: Any) -> int:
    """Bytes of ``5368709120``, ``"5GiB"`` or ``"500 MB"``."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if not found or found[2].lower() not in _SIZES:
            raise wrong(f"must be a size, not {value!r}", "write bytes, or 500MB, 5GiB")
        value = int(float(found[1]) * _SIZES[found[2].lower()])
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(f"must be a size, not {_show(value)}", "write bytes, or 500MB, 5GiB")
    if not 0 < value < 1 << 60:
        raise wrong(f"must be a positive size, not {value}")
    return value


@dataclass(frozen=True)
class Secret:
    """Where the value of a secret environment variable is to be found on the laptop; never the value itself.

    ``source`` is ``env`` (another variable), ``file`` (a path) or ``keyring`` (``service`` or ``service/user``);
    ``key`` is the variable, path or entry, empty for "same name as the variable".
    """

    source: Literal["env", "file", "keyring"]
    key: str = ""


_SECRET_FORMS = "write {from: env}, {env: OTHER_NAME}, {file: PATH} or {keyring: SERVICE/USER}"


def env_value(value: Any) -> str | Secret:
    """One value of an ``env:`` mapping: text, or where a secret comes from."""
    if isinstance(value, str | Secret):
        return value
    if value is None:
        raise wrong("has no value", f'write "" for an empty value; for a secret, {_SECRET_FORMS}')
    if isinstance(value, Mapping):
        forms = set(value)
        if forms == {"from"} and value["from"] == "env":
            return Secret("env")
        if len(forms) == 1:
            (source,) = forms
            key = value[source]
            if source in {"env", "file", "keyring"} and isinstance(key, str) and key:
                return Secret(source, key)
        raise wrong(f"is not a form of secret: {_show(dict(value))}", _SECRET_FORMS)
    raise wrong(f"must be text, not {_show(value)}", 'quote it: "..."')


def env_name(value: Any) -> str:
    """Name of an environment variable that a plan may set."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise wrong(f"{value!r} is not a name for an environment variable", "letters, digits and _ only")
    if value.startswith("ORCH_"):
        raise wrong(f"{value} is set by orch itself", "variables that start with ORCH_ are reserved")
    return value


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


SECRET_SCHEMA: dict[str, Any] = {
    "type": "object",
    "description": "Where a secret's value is on the laptop.",
    "oneOf": [
        {"properties": {"from": {"const": "env"}}, "required": ["from"], "additionalProperties": False},
        *(
            {"properties": {key: {"type": "string", "minLength": 1}}, "required": [key], "additionalProperties": False}
            for key in ("env", "file", "keyring")
        ),
    ],
}
"""JSON schema of `Secret` as it is written."""
_TIME = {"description": "Seconds, or 90s, 30m, 1h30m, 2d.", "anyOf": [{"type": "number", "minimum": 0}, {"type": "string"}]}
_BYTES = {"description": "Bytes, or 500MB, 5GiB.", "anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}
_ENV = {
    "type": "object",
    "propertyNames": {"pattern": "^(?!ORCH_)[A-Za-z_][A-Za-z0-9_]*$"},
    "additionalProperties": {"anyOf": [{"type": ["string", "number", "boolean"]}, SECRET_SCHEMA]},
}
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}

Duration = Annotated[float, BeforeValidator(duration_s), WithJsonSchema(_TIME)]
"""Seconds; also ``30m``, ``1h30m``."""
Size = Annotated[int, BeforeValidator(size_bytes), WithJsonSchema(_BYTES)]
"""Bytes; also ``5GiB``."""
Env = Annotated[
    dict[Annotated[str, PlainValidator(env_name)], Annotated[str | Secret, PlainValidator(env_value)]],
    WithJsonSchema(_ENV),
]
Texts = Annotated[list[str], BeforeValidator(_one_or_many), WithJsonSchema(_TEXTS)]
"""A list of texts; one text alone is a list of one."""


# ------------------------------------------------------------------------------------------------------------ checking


def check(
    model: type[M],
    document: Document,
    value: Any,
    at: Where = (),
    name_of: Callable[[Where], str] | None = None,
) -> tuple[M | None, list[Problem]]:
    """Validate a part of a document.

    Args:
        model: what the value has to be.
        document: gives the lines.
        value: the value, with null entries already dropped.
        at: path of ``value`` in the document.
        name_of: how a path is called in messages; default: its parts joined by dots.

    Returns:
        The model, or None when there are problems, and the problems.
    """
    try:
        return model.model_validate(value), []
    except ValidationError as error:
        problems = [
            _problem(model, document, detail, at, name_of or dotted)
            for detail in error.errors(include_url=False)
        ]
        return None, problems


def dotted(where: Where) -> str:
    """``("hosts", "a", "gpus")`` as ``hosts.a.gpus``."""
    return ".".join(str(part) for part in where)


def _problem(
    model: type[BaseModel],
    document: Document,
    detail: ErrorDetails,
    at: Where,
    name_of: Callable[[Where], str],
) -> Problem:
    loc = tuple(part for part in detail["loc"] if part != "[key]")
    where = (*at, *loc)
    name = name_of(where)
    kind, seen, ctx = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        allowed = _keys(_annotation_at(model, loc[:-1]))
        scope = name_of(where[:-1])
        return document.problem(
            where,
            f"unknown key {loc[-1]!r}" + (f" in {scope}" if scope else ""),
            suggest(str(loc[-1]), allowed),
        )
    if kind == "missing":
        scope = name_of(where[:-1])
        message = f"the key {loc[-1]!r} is missing" + (f" in {scope}" if scope else "")
        return document.problem(where[:-1], message, None)
    if kind == "literal_error":
        options = _literals(_annotation_at(model, loc)) or [str(ctx.get("expected", ""))]
        return document.problem(where, f"{name}: {_show(seen)} is not allowed", suggest(str(seen), options))
    if kind == "orch":
        return document.problem(where, f"{name}: {detail['msg']}" if name else detail["msg"], ctx.get("hint"))
    return document.problem(
        where, f"{name or 'the file'}: {_sentence(kind, seen, ctx, detail['msg'])}", _hint(kind, seen)
    )


_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping (key: value)",
    "model_type": "a mapping (key: value)",
    "model_attributes_type": "a mapping (key: value)",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _sentence(kind: str, seen: Any, ctx: Mapping[str, Any], fallback: str) -> str:
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, not {_show(seen)}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"must be {words} {ctx[key]}, not {_show(seen)}"
    if kind == "string_too_short":
        return "is empty"
    if kind == "too_short":
        return "is an empty list" if not seen else fallback
    return f"{fallback[:1].lower()}{fallback[1:]}, not {_show(seen)}"


def _hint(kind: str, seen: Any) -> str | None:
    if kind == "string_type" and isinstance(seen, int | float):
        return 'quote it: "..."'
    if kind == "string_type" and isinstance(seen, Mapping) and seen:
        return "a value that starts with { or holds ': ' must be quoted: '...'"
    if kind == "bool_type" and str(seen).lower() in {"yes", "no", "on", "off", "y", "n", "0", "1"}:
        return "YAML 1.2 knows true and false only"
    if kind in {"int_type", "float_type"} and isinstance(seen, str) and re.fullmatch(r"[-+]?[\d._]+", seen):
        return "remove the quotes"
    if kind == "list_type":
        return "write [a, b] or one '- item' a line"
    return None


def suggest(seen: str, allowed: Iterable[str], label: str = "allowed") -> str:
    """The nearest right spelling, and what is allowed."""
    names = list(allowed)
    alike = nearest(seen, names)
    listing = f"{label}: {', '.join(names)}" if names else f"{label}: none"
    return f"did you mean {alike!r}? {listing}" if alike else listing


def nearest(seen: str, names: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The name most like ``seen``, differences of case, ``-`` and ``_`` ignored; None when nothing is alike."""
    plain = {name.lower().replace("-", "_"): name for name in reversed(names)}
    found = difflib.get_close_matches(seen.lower().replace("-", "_"), list(plain), n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def _show(value: Any) -> str:
    """A value as seen, short, with its kind where that is what was wrong."""
    if isinstance(value, str):
        shown = repr(value if len(value) <= 60 else value[:57] + "...")
        return f"the text {shown}"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a mapping (" + ", ".join(f"{k}: ..." for k in list(value)[:3]) + ")"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _strip(annotation: Any) -> Any:
    """Remove Annotated and Optional from a type."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in {Union, types.UnionType}:
            rest = [arg for arg in get_args(annotation) if arg is not type(None)]
            if len(rest) != 1:
                return annotation
            annotation = rest[0]
        else:
            return annotation


def _annotation_at(annotation: Any, loc: Sequence[str | int]) -> Any:
    """Type of the value at a path inside a model, or None where the path leaves the models."""
    for part in loc:
        annotation = _strip(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            fields = {field.alias or name: field for name, field in annotation.model_fields.items()}
            if part not in fields:
                return None
            annotation = fields[str(part)].annotation
        elif get_origin(annotation) is list:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            return None
    return _strip(annotation)


def _keys(annotation: Any) -> list[str]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [field.alias or name for name, field in annotation.model_fields.items()]
    return []


def _literals(annotation: Any) -> list[str]:
    return [str(arg) for arg in get_args(annotation)] if get_origin(annotation) is Literal else []


def without_nulls(value: Any) -> Any:
    """A mapping without its empty entries (``needs:`` with nothing behind it is the same as no ``needs:``)."""
    if isinstance(value, dict):
        return {key: item for key, item in value.items() if item is not None}
    return value


def unusable_text(document: Document, value: Any, where: Where = ()) -> Iterator[Problem]:
    """Texts that no file system, environment or JSON reader would take: NUL and lone surrogates; infinities."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from unusable_text(document, key, (*where, key))
            yield from unusable_text(document, item, (*where, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from unusable_text(document, item, (*where, index))
    elif isinstance(value, str):
        if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
            yield document.problem(
                where, "text with a NUL or half of a surrogate pair in it", "remove the escape"
            )
    elif isinstance(value, float) and not math.isfinite(value):
        yield document.problem(where, f"{value} is not a number that can be used", None)
