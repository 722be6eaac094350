"""Prints how long each folder under tests/ took, above pytest's closing line: the suite has a budget."""

from __future__ import annotations

from collections import defaultdict

import pytest

GROUPS = pytest.StashKey[dict[str, list[float]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[GROUPS] = defaultdict(lambda: [0.0, 0.0])


def group_of(nodeid: str) -> str:
    """The folder below tests/ that a test's id lies in."""
    parts = nodeid.split("::", 1)[0].split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else "/".join(parts[:-1]) or "."


class Clock:
    """Adds up set-up, call and teardown of every test."""

    def __init__(self, config: pytest.Config) -> None:
        self.groups = config.stash[GROUPS]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        group = self.groups[group_of(report.nodeid)]
        group[0] += report.duration
        group[1] += report.when == "call"


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(Clock(session.config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    groups = config.stash[GROUPS]
    if len(groups) < 2:
        return
    terminalreporter.section("minutes per group")
    for name, (seconds, count) in sorted(groups.items(), key=lambda item: -item[1][0]):
        terminalreporter.write_line(f"{seconds / 60:6.2f} min  {int(count):5d} tests  {name}")
    total = sum(seconds for seconds, _ in groups.values())
    terminalreporter.write_line(f"{total / 60:6.2f} min  in all")
