"""Read YAML 1.2 the careful way: values together with the line each one stands on.

ruamel.yaml composes the node tree (scanner, parser, YAML 1.2 resolver); this file turns nodes into plain Python
values and remembers, for every path such as ``("steps", 0, "with", "layers")``, its line and its text as written.
That is what lets an error say "plans/eagle3.yaml:14". Going through nodes also keeps every trap at one place:
duplicate keys, alias bombs and alias cycles, tags that would construct objects, dates that nobody asked for.

Everything that can be wrong with a file becomes a ConfigError; no exception of ruamel leaves this module.
Must not import plan or inventory: it knows nothing of what the values mean.
"""

from __future__ import annotations

import difflib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from orchestrator.core.errors import ConfigError, Problem

Key = str | int
Where = tuple[Key, ...]
"""Path of a value inside a document: keys of mappings, indexes of lists."""

MAX_BYTES = 1 << 18
"""A plan or inventory longer than this is a mistake (a log, a dataset), and is not parsed."""
MAX_NODES = 50_000
"""Values in one document, aliases counted each time they are used: the limit on alias bombs."""
MAX_DEPTH = 40

_TAG = "tag:yaml.org,2002:"


@dataclass
class Document:
    """One YAML document.

    Attributes:
        name: how the file is called in messages, as the user typed it; None for a command-line value.
        value: plain Python: dict, list, str, int, float, bool, None.
        lines: line (from 1) of each value; for a mapping's entry, the line of its key.
        texts: the text as written of each plain scalar that is not a string (``1.10``, ``true``, ``0x1f``).
        problems: mistakes that do not stop the reading, such as duplicate keys.
        sets: command-line options (``--set a.b=1``) that wrote a value over or into the file's.
    """

    name: str | None
    value: Any
    lines: dict[Where, int] = field(default_factory=dict)
    texts: dict[Where, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    sets: dict[Where, str] = field(default_factory=dict)

    def problem(self, where: Where, message: str, hint: str | None = None) -> Problem:
        """A problem with a value, placed at its line, or at the ``--set`` that brought it."""
        for length in range(len(where), 0, -1):
            option = self.sets.get(where[:length])
            if option is not None:
                return Problem(f"{option}: {message}", hint)
            if where[:length] in self.lines:
                break
        return Problem(message, hint, self.name, self.line(where))

    def forget(self, where: Where) -> None:
        """Drop the positions of a value that another one replaces."""
        for path in [path for path in self.lines if path[: len(where)] == where]:
            del self.lines[path]
            self.texts.pop(path, None)

    def line(self, where: Where) -> int | None:
        """Line of a value, or of the nearest enclosing one that has a line."""
        for length in range(len(where), -1, -1):
            found = self.lines.get(where[:length])
            if found is not None:
                return found
        return None


def read_text(path: Path, what: str) -> str:
    """Text of a small configuration file.

    Args:
        path: the file; a byte order mark is accepted (UTF-8, UTF-16).
        what: ``plan`` or ``inventory``, for the messages.

    Raises:
        ConfigError: no such file, a directory, unreadable, too large, binary, or not UTF-8.
    """
    name = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"no such {what} file", _nearest_file(path), file=name) from None
    except IsADirectoryError:
        raise ConfigError(f"this is a folder, not {_a(what)} file", _yaml_inside(path), file=name) from None
    except (OSError, ValueError) as error:
        if _is_directory(path):  # Windows says "permission denied" for a folder
            raise ConfigError(f"this is a folder, not {_a(what)} file", _yaml_inside(path), file=name) from None
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read the {what}: {reason}", file=name) from None
    if len(data) > MAX_BYTES:
        message = f"longer than {MAX_BYTES >> 10} KiB, so this is not {_a(what)}"
        raise ConfigError(message, f"{_a(what)} is a small YAML file: is this the right path?", file=name)
    return _decode(data, name, what)


def _a(what: str) -> str:
    """A noun with its article."""
    return f"{'an' if what[0] in 'aeiou' else 'a'} {what}"


def _decode(data: bytes, name: str, what: str) -> str:
    try:
        if data.startswith((b"\xff\xfe", b"\xfe\xff")):
            return data.decode("utf-16")
        if b"\0" in data:
            message = f"this is a binary file, not {_a(what)}"
            raise ConfigError(message, f"{_a(what)} is YAML text in UTF-8", file=name)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{data[error.start]:02x} is not UTF-8 text"
        raise ConfigError(message, "save the file as UTF-8", file=name, line=line) from None


def parse(text: str, name: str | None = None) -> Document:
    """Parse one YAML 1.2 document.

    Raises:
        ConfigError: not YAML, several documents, or beyond the limits on size and depth.
    """
    if text.lstrip().startswith("%YAML") and not text.lstrip().startswith("%YAML 1.2"):
        raise ConfigError("only YAML 1.2 is read here", "remove the %YAML line", file=name, line=1)
    reader = YAML(typ="safe", pure=True)
    reader.max_depth = MAX_DEPTH
    reader.composer.warn_double_anchors = False  # YAML allows a second &name; the newest counts
    try:
        node = reader.compose(text)
    except RecursionError:
        raise ConfigError(f"nested more than {MAX_DEPTH} levels deep", file=name) from None
    except MarkedYAMLError as error:
        raise _syntax_error(error, text, name) from None
    except YAMLError as error:
        raise _reader_error(error, text, name) from None
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        # ruamel meets odd input (lone surrogates, broken directives) with exceptions that are not its own.
        raise ConfigError(f"this is not YAML: {error}", file=name) from None
    document = Document(name, None)
    if node is not None:
        document.value = _Builder(document).build(node, (), 0)
    return document


def load(path: Path, what: str) -> Document:
    """Read and parse a file; see :func:`read_text` and :func:`parse` for what is raised."""
    return parse(read_text(path, what), str(path))


class _Builder:
    """Turns composed nodes into values, within limits."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.nodes = 0
        self.open: set[int] = set()

    def fail(self, message: str, node: Node, hint: str | None = None) -> ConfigError:
        return ConfigError(message, hint, file=self.document.name, line=_line(node))

    def build(self, node: Node, where: Where, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise self.fail(f"more than {MAX_NODES} values once its aliases (*name) are followed", node)
        if depth > MAX_DEPTH:
            raise self.fail(f"nested more than {MAX_DEPTH} levels deep", node)
        self.document.lines.setdefault(where, _line(node))
        if isinstance(node, ScalarNode):
            return self.scalar(node, where)
        if id(node) in self.open:
            raise self.fail("an alias (*name) that contains itself", node)
        self.open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                self.expect_tag(node, "seq")
                return [self.build(item, (*where, i), depth + 1) for i, item in enumerate(node.value)]
            self.expect_tag(node, "map")
            return self.mapping(node, where, depth)
        finally:
            self.open.discard(id(node))

    def expect_tag(self, node: Node, kind: str) -> None:
        if str(node.tag) != _TAG + kind:
            raise self.fail(f"the tag {_short_tag(node)} is not allowed here", node, "write the plain value")

    def mapping(self, node: Node, where: Where, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            if str(key_node.tag) == _TAG + "merge":
                for key, value in self.merge(value_node, where, depth).items():
                    merged.setdefault(key, value)
                continue
            key = self.key(key_node)
            line = _line(key_node)
            if key in seen:
                message = f"the key {key!r} is given twice, first on line {seen[key]}"
                self.document.problems.append(Problem(message, "remove one", self.document.name, line))
                continue
            seen[key] = line
            self.document.forget((*where, key))  # a merge may have been here before
            self.document.lines[*where, key] = line
            result[key] = self.build(value_node, (*where, key), depth + 1)
        return {**{key: value for key, value in merged.items() if key not in result}, **result}

    def merge(self, node: Node, where: Where, depth: int) -> dict[str, Any]:
        """Value of a ``<<`` key: one mapping, or a list of them where the first wins."""
        sources = node.value if isinstance(node, SequenceNode) else [node]
        merged: dict[str, Any] = {}
        for source in sources:
            if not isinstance(source, MappingNode):
                raise self.fail("<< merges a mapping or a list of mappings", node, "write <<: *name")
            for key, value in self.build(source, where, depth + 1).items():
                merged.setdefault(key, value)
        return merged

    def key(self, node: Node) -> str:
        if not isinstance(node, ScalarNode):
            raise self.fail(
                "a list or mapping cannot be a key", node, "quote {...} and [...] in keys and values"
            )
        if str(node.tag) == _TAG + "null":
            raise self.fail("a key is empty", node)
        return str(node.value)

    def scalar(self, node: ScalarNode, where: Where) -> Any:
        tag, text = str(node.tag), str(node.value)
        kind = tag[len(_TAG) :] if tag.startswith(_TAG) else None
        if kind in {"str", "timestamp", "value", "merge"}:  # YAML 1.2 has neither dates nor these indicators
            return text
        if kind not in {"null", "bool", "int", "float"}:
            raise self.fail(f"the tag {_short_tag(node)} is not allowed here", node, "write the plain value")
        self.document.texts[where] = text
        try:
            return _plain(kind, text)
        except (ValueError, OverflowError):
            shown = text if len(text) <= 24 else text[:20] + "..."
            raise self.fail(
                f"{shown!r} is not a number that can be used", node, 'quote text: "..."'
            ) from None


def _plain(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        if text.lower() not in {"true", "false"}:
            raise ValueError(text)
        return text.lower() == "true"
    digits = text.replace("_", "").lower()
    if kind == "int":
        sign, body = (-1, digits[1:]) if digits.startswith("-") else (1, digits.lstrip("+"))
        for prefix, base in (("0x", 16), ("0o", 8), ("0b", 2)):
            if body.startswith(prefix):
                return sign * int(body[2:], base)
        return sign * int(body)
    if digits.endswith((".inf", ".nan")):
        return float(digits.replace(".", ""))
    return float(digits)


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _short_tag(node: Node) -> str:
    tag = str(node.tag)
    return "!!" + tag[len(_TAG) :] if tag.startswith(_TAG) else tag


_SYNTAX_HINTS = (
    # ruamel's words -> ours: (part of its problem, message, hint)
    ("character '\\t'", "a tab where YAML wants spaces", "indent with spaces"),
    (
        "mapping values are not allowed",
        "a ': ' inside an unquoted value, or wrong indentation",
        'quote it: "..."',
    ),
    ("found undefined alias", None, "define it first with &name"),
    (
        "expected a single document",
        "several documents in one file",
        "keep one: remove the '---' between them",
    ),
    (
        "but found another document",
        "several documents in one file",
        "keep one: remove the '---' between them",
    ),
    ("could not find expected ':'", "a line without ': '", "write key: value"),
    ("found unexpected end of stream", "a quote is opened and never closed", None),
    ("maximum depth", f"nested more than {MAX_DEPTH} levels deep", None),
    ("expected ',' or ']'", "a list [...] is not closed", "add the missing ] or ,"),
    ("expected ',' or '}'", "a mapping {...} is not closed", "add the missing } or ,"),
    ("did not find expected key", "wrong indentation, or a stray quote", None),
    ("expected <block end>", "wrong indentation", "keys of one mapping start in the same column"),
    ("cannot start any token", None, 'quote values that start with @, ` or %: "..."'),
)


def _syntax_error(error: MarkedYAMLError, text: str, name: str | None) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    problem = str(error.problem or error.context or "not YAML").strip()
    line = min(int(mark.line) + 1, text.count("\n") + 1) if mark is not None else None
    if mark is not None and "expected <block end>" in problem and "scalar" in problem:
        before = text.split("\n")[mark.line][: mark.column].rstrip()
        if before.endswith(("}", "]", '"', "'")):  # run: {files}/x.sh
            after = f"text after a closing {before[-1]}"
            return ConfigError(after, "quote the whole value: '...'", file=name, line=line)
    for part, message, hint in _SYNTAX_HINTS:
        if part in problem:
            if (
                part.startswith("expected ','") or "end of stream" in part
            ) and error.context_mark is not None:
                line = int(error.context_mark.line) + 1
            return ConfigError(message or f"this is not YAML: {problem}", hint, file=name, line=line)
    return ConfigError(f"this is not YAML: {problem}", file=name, line=line)


def _reader_error(error: YAMLError, text: str, name: str | None) -> ConfigError:
    position = getattr(error, "position", None)
    if position is None:
        return ConfigError(f"this is not YAML: {error}".split("\n", 1)[0], file=name)
    line = text.count("\n", 0, position) + 1
    character = ord(text[position]) if position < len(text) else 0
    message = f"a control character (U+{character:04X})"
    return ConfigError(message, "remove it, or save the file as UTF-8 text", file=name, line=line)


def _is_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _yaml_inside(folder: Path) -> str | None:
    names = sorted(p.name for p in folder.glob("*.y*ml"))[:5]
    return "did you mean " + " or ".join(str(folder / name) for name in names) + "?" if names else None


def _nearest_file(path: Path) -> str | None:
    """A hint for a file name that does not exist: the most alike one in the same folder."""
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in {".yaml", ".yml"}]
    except (OSError, ValueError):
        return None
    alike = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
    if alike:
        return f"did you mean {path.parent / alike[0]}?"
    return f"in that folder: {', '.join(sorted(names)[:8])}" if names else None
