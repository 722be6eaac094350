"""Questions that wait for an answer on standard input: only ever looked for in the last text of a log.

Why apart from the rules: the supervisor's follower needs it and must load no rule.

Must not import anything but the standard library and lines.py; no I/O.
"""

from __future__ import annotations

import re
from typing import Optional, Tuple

from remote_jobs.logs.lines import read_prefix, to_text

PROMPT = re.compile(
    r"(?i)\(\d\) don't visualize my results\s*$|(?:\[y(?:es)?/n(?:o)?\]|\(y(?:es)?/n(?:o)?(?:/\[?\w+\]?)?\)|\[yes\]|\(yes/no/\[fingerprint\]\)|\[Y/n/\w\]|\(\[y\]/n\)|\[y\|n\]|\(y\|n\)|\(y or n\)|yes or no)\s*[?:>]?\s*$"
    r"|(?:^|[\s'\"])pass(?:word|phrase)(?: for [^:]{1,120})?:\s*$|Enter passphrase for key .*:\s*$|verification code:\s*$"
    r"|(?:enter|type|paste|input|provide|select|choose)\b[^.!]{0,100}(?:choice|token|key|code|number|option|name|value|path|api.?key|here|credentials|selection|\(input will not be visible\)|and hit enter[^:]*)[^.!]{0,40}[:?>]\s*$"
    r"|press (?:any key|enter|return|\[?enter\]?)[^.]{0,40}(?:to continue|\.\.\.|:)?\s*$"
    r"|username(?: for [^:]{1,120})?:\s*$|enter passphrase[^:]{0,80}:\s*$|\(END\)$|^login:\s*$|your (?:choice|answer|selection)[^:?]{0,30}[:?]\s*$|^token:\s*$|--More--|^\(Pdb\) ?$|^ipdb> ?$|^>>> ?$"
    r"|do you (?:want|wish|accept|agree)[^?]{0,160}\?\s*(?:[\[(][^\])]{1,30}[\])])?\s*:?\s*$|(?:continue|proceed|overwrite|replace|are you sure)[^?.]{0,80}\?\s*(?:[\[(][^\])]{1,40}[\])])?\s*:?\s*$"
)
"""Text of a question; judged on the last text of a log, without its prefix."""


def prompt_in(tail: bytes, last_line: int) -> Optional[Tuple[int, str]]:
    """(line, text) of a question that is the last text of a log. ``last_line`` is the number of the last line."""
    kept = tail.rstrip()
    if not kept:
        return None
    start = max(kept.rfind(b"\n"), kept.rfind(b"\r")) + 1
    text = to_text(kept[start:][-2000:])
    body = text[read_prefix(text).size :].strip()
    if not body or len(body) > 600 or not PROMPT.search(body):
        return None
    return last_line - tail[len(kept) :].count(b"\n"), text.strip()
