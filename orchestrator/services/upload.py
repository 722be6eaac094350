"""A plan's own files onto the host: by content hash, so a second launch sends nothing and a broken upload goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from orchestrator.core.answers import HINT
from orchestrator.core.errors import ConfigError, HostError, ProtocolError

if TYPE_CHECKING:
    from orchestrator.hosts.agent import AgentClient

CHUNK_BYTES = 1 << 20
MAX_ROUNDS = 5
"""How often an upload is taken up again when the host says that it has other bytes than expected."""


class Progress(Protocol):
    """Hears how a transfer goes."""

    def start(self, name: str, total_bytes: int, done_bytes: int) -> None:
        """A file begins, of which some bytes are there already."""

    def advance(self, num_bytes: int) -> None:
        """More bytes of the current file have arrived."""

    def finish(self) -> None:
        """The current file is whole."""


@dataclass(frozen=True)
class HashedFile:
    """A local file with what identifies its content."""

    path: Path
    sha256: str
    size: int
    executable: bool


def hash_file(path: Path, shown: str) -> HashedFile:
    """Read a file once for its hash.

    Raises:
        ConfigError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
        executable = bool(path.stat().st_mode & 0o100)
    except OSError as error:
        raise ConfigError(
            f"files: {shown}: cannot be read: {error.strerror or error}", "check the path"
        ) from error
    return HashedFile(path, digest.hexdigest(), size, executable)


def upload(agent: AgentClient, files: Sequence[HashedFile], progress: Progress) -> int:
    """Send what the host does not have; the bytes sent.

    Raises:
        HostFull, HostError: the host could not take them; what arrived is kept and used next time.
        ConfigError: a file changed while it was read.
    """
    by_hash = {file.sha256: file for file in files}
    if not by_hash:
        return 0
    sent = 0
    for missing in agent.request("have", sha256=list(by_hash))["missing"]:
        file = by_hash.get(missing["sha256"])
        if file is None:
            raise ProtocolError(f"{agent.host}: it asks for a file that was never offered to it", HINT)
        sent += _send(agent, file, missing["offset"], progress)
    return sent


def _send(agent: AgentClient, file: HashedFile, offset: int, progress: Progress) -> int:
    sent = 0
    for _ in range(MAX_ROUNDS):
        if offset > file.size:
            offset = 0
        progress.start(file.path.name, file.size, offset)
        with file.path.open("rb") as source:
            source.seek(offset)
            while True:
                chunk = source.read(CHUNK_BYTES)
                last = offset + len(chunk) >= file.size
                if not chunk and not last:
                    raise ConfigError(f"{file.path} became shorter while it was sent", "launch again")
                answer = agent.request(
                    "put", payload=chunk, sha256=file.sha256, size=file.size, offset=offset, last=last
                )
                if answer.get("stored"):
                    sent += len(chunk)
                    progress.advance(len(chunk))
                    progress.finish()
                    return sent
                told = answer["offset"]
                if told != offset + len(chunk):
                    # A part was lost with a broken link (or another upload of it runs): go on from what is there.
                    offset = told
                    break
                sent += len(chunk)
                progress.advance(len(chunk))
                offset = told
                if last:
                    break
    raise HostError(f"{file.path.name} could not be uploaded whole in {MAX_ROUNDS} rounds", "launch again")
