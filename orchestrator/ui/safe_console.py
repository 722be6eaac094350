"""A rich console that lets no control character of a text through; those that rich itself writes are another matter.

Rich strips some controls (bell, backspace) from texts, but not ESC: a job named `ESC ] 0 ; title BEL` would set the
window's title.  Must import nothing heavy but rich.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from orchestrator.ui.text import printable


class SafeConsole(Console):
    """`print`, live displays and progress bars all render through here."""

    def render(self, *arguments: Any, **options: Any) -> Iterable[Segment]:
        """Segments of a renderable, each text made printable."""
        for segment in super().render(*arguments, **options):
            text = segment.text
            if segment.control or text == "\n" or text.isprintable():
                yield segment
            else:
                yield Segment(printable(text), segment.style)
