"""The ledger: jobs launched or seen from this laptop, in one SQLite file. An index and a memory, never the truth.

It knows which launches were begun and not yet confirmed (so that a resend adopts instead of starting a second copy),
where each job id lives, and what was last seen of it. Everything but the intents can be had again from the hosts, so a
file that SQLite cannot read is set aside and begun anew, said in one line.

Several orch processes may use it at once (WAL, a busy timeout, short write transactions), and several threads of one.
Must not import hosts or services.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from orchestrator.core.errors import LocalError
from orchestrator.core.paths import ledger_path

SCHEMA_VERSION = 1
BUSY_TIMEOUT_S = 15.0
REPAIR_LOCK_STALE_S = 20.0
MAX_JOBS = 5_000
MAX_RUNS = 20_000
MAX_VIEW_BYTES = 256 * 1024
"""Bounds of the file: the newest are kept. A host decides how large a view is, so it is bounded as well."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
  id TEXT PRIMARY KEY,
  host TEXT NOT NULL,
  name TEXT NOT NULL,
  plan_sha256 TEXT,
  created_at TEXT NOT NULL,
  confirmed_at TEXT,                 -- null: the launch was begun, and no host has answered for it yet
  seen_at TEXT,
  seq INTEGER NOT NULL DEFAULT -1,   -- of the last event in the view, an older view never replaces a newer one
  view TEXT                          -- the job's JSON as last seen
);
CREATE INDEX IF NOT EXISTS intents ON jobs (plan_sha256, host) WHERE confirmed_at IS NULL;
CREATE TABLE IF NOT EXISTS runs (    -- mirror of <root>/history of the hosts
  host TEXT NOT NULL,
  job TEXT NOT NULL,
  record TEXT NOT NULL,
  PRIMARY KEY (host, job)
);
"""
_CORRUPT = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})

T = TypeVar("T")


@dataclass(frozen=True)
class JobRow:
    """One job of the ledger. Times are ISO UTC."""

    id: str
    host: str
    name: str
    plan_sha256: str | None
    created_at: str
    confirmed: bool
    seen_at: str | None
    view: dict[str, Any] | None


class _NotOurs(sqlite3.DatabaseError):
    """A SQLite file, but not a ledger."""


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")


class Ledger:
    """The open ledger. Use :meth:`open`; close it at the end."""

    def __init__(self, path: Path, connection: sqlite3.Connection, say: Callable[[str], None]) -> None:
        self.path = path
        self._connection = connection
        self._say = say
        self._wrote = False
        self._lock = threading.RLock()

    @classmethod
    def open(cls, path: Path | None = None, *, say: Callable[[str], None] = _to_stderr) -> Ledger:
        """Open or create the ledger.

        Args:
            path: the file; default: in ``ORCH_HOME``.
            say: hears one line when a broken file was set aside.

        Raises:
            LocalError: the folder or file cannot be written, or a newer orch wrote it.
        """
        path = path or ledger_path()
        with _explained(path):
            try:
                return cls(path, _connect(path), say)
            except sqlite3.DatabaseError as error:
                if not _is_corrupt(error):
                    raise
                return cls(path, _repaired(path, error, say), say)

    def close(self) -> None:
        """Close the file; what is beyond its bounds goes first."""
        with self._lock:
            with contextlib.suppress(LocalError, sqlite3.Error):
                if self._wrote and self._oversized():
                    self.trim()
            self._connection.close()

    def _oversized(self) -> bool:
        counts = "SELECT (SELECT count(*) FROM jobs) AS jobs, (SELECT count(*) FROM runs) AS runs"
        row = self._connection.execute(counts).fetchone()
        return bool(row["jobs"] > MAX_JOBS or row["runs"] > MAX_RUNS)

    def trim(self, *, shrink: bool = False) -> int:
        """Forget the oldest jobs and runs beyond the bounds, never an unconfirmed launch; how many went.

        Args:
            shrink: give the room back to the file system too.
        """
        with self._writing() as db:
            gone = db.execute(
                "DELETE FROM jobs WHERE confirmed_at IS NOT NULL AND rowid IN "
                "(SELECT rowid FROM jobs ORDER BY created_at DESC, rowid DESC LIMIT -1 OFFSET ?)",
                (MAX_JOBS,),
            ).rowcount
            gone += db.execute(
                "DELETE FROM runs WHERE rowid IN (SELECT rowid FROM runs ORDER BY rowid DESC LIMIT -1 OFFSET ?)",
                (MAX_RUNS,),
            ).rowcount
        if shrink:
            with self._lock, _explained(self.path):
                self._connection.execute("VACUUM")
                self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return gone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------- launches

    def record_intent(self, job: str, *, host: str, plan_sha256: str, name: str, created_at: str) -> None:
        """Write down that a launch is about to be sent; on disk before this returns."""
        with self._writing() as db:
            db.execute(
                "INSERT INTO jobs (id, host, name, plan_sha256, created_at) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO NOTHING",
                (job, host, name, plan_sha256, created_at),
            )

    def unconfirmed(self, plan_sha256: str, host: str) -> JobRow | None:
        """The newest launch of this plan on this host that no answer has confirmed."""
        rows = self._read(
            "SELECT * FROM jobs WHERE plan_sha256 = ? AND host = ? AND confirmed_at IS NULL "
            "ORDER BY created_at DESC, rowid DESC LIMIT 1",
            (plan_sha256, host),
        )
        return rows[0] if rows else None

    def confirm(self, job: str, now: datetime) -> None:
        """The host has answered for this job."""
        self.confirm_all([job], now)

    def confirm_all(self, jobs: Sequence[str], now: datetime) -> None:
        """The same for several jobs at once: all of them or none."""
        with self._writing() as db:
            db.executemany(
                "UPDATE jobs SET confirmed_at = coalesce(confirmed_at, ?) WHERE id = ?",
                [(_iso(now), job) for job in jobs],
            )

    def drop_intent(self, job: str) -> None:
        """Forget a launch that certainly never reached its host. A confirmed job stays."""
        with self._writing() as db:
            db.execute("DELETE FROM jobs WHERE id = ? AND confirmed_at IS NULL", (job,))

    # ---------------------------------------------------------------------------------------------------------- jobs

    def jobs(self, host: str | None = None) -> list[JobRow]:
        """All jobs, newest first; those of one host when it is named."""
        where, values = ("WHERE host = ? ", (host,)) if host is not None else ("", ())
        return self._read(f"SELECT * FROM jobs {where}ORDER BY created_at DESC, rowid DESC", values)  # noqa: S608

    def job(self, job: str) -> JobRow | None:
        """One job by its whole id."""
        rows = self._read("SELECT * FROM jobs WHERE id = ?", (job,))
        return rows[0] if rows else None

    def saw(self, views: Sequence[Mapping[str, Any]], now: datetime) -> None:
        """Remember what a reachable host answered. Views that are themselves memories are left out.

        An open intent stays open: that some command lists the job does not tell its id to whoever launched it.
        """
        fresh = [view for view in views if view.get("reachable", True)]
        if not fresh:
            return
        at = _iso(now)
        rows = [
            (
                str(view["id"]),
                str(view.get("host") or ""),
                _stored(view.get("name") or view["id"]),
                None if view.get("plan_sha256") is None else _stored(view["plan_sha256"]),
                _stored(view.get("created_at") or view.get("started_at") or at),
                at,
                at,
                int(view.get("seq") or 0),
                _kept(view),
            )
            for view in fresh
        ]
        with self._writing() as db:
            db.executemany(
                "INSERT INTO jobs (id, host, name, plan_sha256, created_at, confirmed_at, seen_at, seq, view) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET host = excluded.host, "
                "name = excluded.name, plan_sha256 = coalesce(jobs.plan_sha256, excluded.plan_sha256), "
                "seen_at = excluded.seen_at, seq = excluded.seq, view = excluded.view WHERE excluded.seq >= jobs.seq",
                rows,
            )

    def forget(self, job: str) -> None:
        """Take a job out of the ledger; its host is not asked."""
        with self._writing() as db:
            db.execute("DELETE FROM jobs WHERE id = ?", (job,))

    # ------------------------------------------------------------------------------------------------------- history

    def mirror_runs(self, host: str, runs: Sequence[Mapping[str, Any]]) -> None:
        """Keep a copy of a host's history records, which carry durations and the scores of forecasts."""
        rows = [
            (host, _stored(run["job"]), json.dumps(run, separators=(",", ":"))) for run in runs if run.get("job")
        ]
        with self._writing() as db:
            db.executemany("INSERT OR REPLACE INTO runs (host, job, record) VALUES (?, ?, ?)", rows)

    def runs(self, host: str | None = None) -> list[dict[str, Any]]:
        """The mirrored history records."""
        where, values = (" WHERE host = ?", (host,)) if host is not None else ("", ())
        found = self._select(f"SELECT record FROM runs{where} ORDER BY job", values)  # noqa: S608
        return [json.loads(row["record"]) for row in found]

    # ----------------------------------------------------------------------------------------------------- machinery

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A write transaction. The block must be safe to lose: it runs once, on a file known to be sound."""
        with self._lock, _explained(self.path):
            self._begin()
            self._wrote = True
            try:
                yield self._connection
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _begin(self) -> None:
        """BEGIN on a sound file: damage found since the opening is repaired first."""

        def begin(db: sqlite3.Connection) -> None:
            db.execute("BEGIN IMMEDIATE")
            try:
                db.execute("SELECT count(*) FROM jobs").fetchone()
            except sqlite3.Error:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

        self._once_more(begin)

    def _read(self, sql: str, values: Sequence[Any]) -> list[JobRow]:
        return [_row(record) for record in self._select(sql, values)]

    def _select(self, sql: str, values: Sequence[Any]) -> list[sqlite3.Row]:
        with self._lock, _explained(self.path):
            return self._once_more(lambda db: db.execute(sql, values).fetchall())

    def _once_more(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Do some work; when the file turns out to be broken, repair it and do the work again."""
        try:
            return work(self._connection)
        except sqlite3.DatabaseError as error:
            if not _is_corrupt(error):
                raise
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = _repaired(self.path, error, self._say)
            return work(self._connection)


def _kept(view: Mapping[str, Any]) -> str:
    """JSON of a view; one that is too large loses its steps and notes, which its host still has."""
    text = json.dumps(view, separators=(",", ":"), default=str)
    if len(text) <= MAX_VIEW_BYTES:
        return text
    keys = ("id", "name", "host", "created_at", "started_at", "ended_at")
    short = {key: str(view[key])[:500] for key in keys if view.get(key) is not None}
    state = {"state": str(view.get("state"))[:50], "seq": int(view.get("seq") or 0), "eta": None}
    return json.dumps({**short, **state, "steps": [], "notes": []})


def _connect(path: Path) -> sqlite3.Connection:
    """Open the file and make sure that it is a sound ledger of this version."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")  # file systems that cannot do it keep the old way
        connection.execute("PRAGMA synchronous = FULL")  # an intent must outlive a power cut
        version, tables = _found(path, connection)
        if version < SCHEMA_VERSION or not {"jobs", "runs"} <= tables:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("COMMIT")
        connection.execute("SELECT count(*), max(seen_at) FROM jobs").fetchone()
    except BaseException:
        connection.close()
        raise
    return connection


def _found(path: Path, connection: sqlite3.Connection) -> tuple[int, set[str]]:
    """Version and tables of the file."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise LocalError(
            f"the ledger {path} was written by a newer orch: it has version {version}, "
            f"this one reads version {SCHEMA_VERSION}",
            "update orch, or set ORCH_HOME to another folder",
        )
    tables = {
        str(row[0]) for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    }
    if version == 0 and tables - {"jobs", "runs"}:
        raise _NotOurs("it holds the tables of another program")
    return version, tables


def _repaired(path: Path, error: sqlite3.DatabaseError, say: Callable[[str], None]) -> sqlite3.Connection:
    """Set a broken file aside and begin anew; when another process has done so already, use its new file."""
    with _repair_lock(path):
        with contextlib.suppress(sqlite3.DatabaseError):
            connection = _connect(path)
            if connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok":
                return connection
            connection.close()
        aside = _free_name(path)
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                os.replace(f"{path}{suffix}", f"{aside}{suffix}")
        connection = _connect(path)
    say(
        f"orch: the local ledger could not be read ({error}); it was set aside as {aside} and begun anew. "
        "Jobs are not touched: orch status finds them on their hosts."
    )
    return connection


@contextlib.contextmanager
def _repair_lock(path: Path) -> Iterator[None]:
    """Only one process repairs at a time: a folder is the lock, since mkdir is atomic everywhere."""
    lock = Path(f"{path}.repair")
    deadline = time.monotonic() + REPAIR_LOCK_STALE_S
    while True:
        try:
            lock.mkdir()
            break
        except FileExistsError:
            if time.monotonic() > deadline:  # its owner was killed
                break
            time.sleep(0.05)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.rmdir()


def _free_name(path: Path) -> Path:
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    name = path.with_name(f"{path.name}.broken-{stamp}")
    number = 1
    while name.exists():
        number += 1
        name = path.with_name(f"{path.name}.broken-{stamp}-{number}")
    return name


def _is_corrupt(error: sqlite3.DatabaseError) -> bool:
    if isinstance(error, _NotOurs):
        return True
    code = getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in _CORRUPT:
        return True
    # A table of ours without our columns: somebody else's, or a file cut in the making.
    return isinstance(error, sqlite3.OperationalError) and str(error).startswith(
        ("no such column", "no such table")
    )


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Errors of SQLite and of the file system in words, with what to do."""
    try:
        yield
    except sqlite3.Error as error:
        code = (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF
        hint = {
            sqlite3.SQLITE_BUSY: "another orch holds it for long: look for a hanging process",
            sqlite3.SQLITE_FULL: "free some space on this laptop",
        }.get(code, f"make {path.parent} writable, or set ORCH_HOME to another folder")
        raise LocalError(f"the local ledger {path} cannot be used: {error}", hint) from error
    except OSError as error:
        raise LocalError(
            f"the local ledger {path} cannot be used: {error.strerror or error}",
            f"make {path.parent} writable, or set ORCH_HOME to another folder",
        ) from error


def _row(record: sqlite3.Row) -> JobRow:
    view = None
    if record["view"]:
        with contextlib.suppress(ValueError):
            view = json.loads(record["view"])
    return JobRow(
        id=record["id"],
        host=record["host"],
        name=record["name"],
        plan_sha256=record["plan_sha256"],
        created_at=record["created_at"],
        confirmed=record["confirmed_at"] is not None,
        seen_at=record["seen_at"],
        view=view if isinstance(view, dict) else None,
    )


def _iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _stored(text: Any) -> str:
    """A text as SQLite takes it: without halves of surrogate pairs, which a host's file names may hold."""
    return str(text).encode("utf-8", "replace").decode("utf-8")
