"""systemd-logind may kill everything of a login session at logout (KillUserProcesses=yes), detached or not.

Detected from its configuration files; escaped by `systemd-run --user --scope` or a lingering user where that is
available, said otherwise.  Standard library only.  Source: logind.conf(5).
"""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from typing import List, Optional

from remote_jobs.agent import procs


def kills_user_processes() -> Optional[bool]:
    """KillUserProcesses as configured; None without systemd."""
    if not os.path.isdir("/run/systemd/system"):
        return None
    answer = False  # the upstream default is yes, every distribution we know builds it as no
    paths = ["/usr/lib/systemd/logind.conf", "/etc/systemd/logind.conf"]
    for folder in ("/usr/lib/systemd", "/run/systemd", "/etc/systemd"):
        paths += sorted(glob.glob(folder + "/logind.conf.d/*.conf"))
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                for line in file:
                    key, _, value = line.strip().partition("=")
                    if key.strip() == "KillUserProcesses":
                        answer = value.strip().lower() in ("yes", "true", "1", "on")
        except OSError:
            continue
    return answer


def lingers() -> bool:
    """True when this user's processes may outlive the last logout (loginctl enable-linger)."""
    return os.path.exists(os.path.join("/var/lib/systemd/linger", procs.user_name(os.getuid())))


def _scope_works() -> bool:
    if not shutil.which("systemd-run"):
        return False
    try:
        done = subprocess.run(
            ["systemd-run", "--user", "--scope", "--quiet", "true"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=5, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def at_risk() -> bool:
    """True when a logout would kill a supervisor that merely detached. Root is exempt by logind's default."""
    return os.getuid() != 0 and bool(kills_user_processes())


def escape_prefix() -> List[str]:
    """Words to put before the supervisor's command so that a logout does not end it."""
    if at_risk() and _scope_works():
        return ["systemd-run", "--user", "--scope", "--quiet", "--collect"]
    return []


def warnings() -> List[str]:
    """What a person must know about logouts on this host."""
    if not at_risk() or (lingers() and _scope_works()):
        return []
    user = procs.user_name(os.getuid())
    return [
        "systemd-logind on this host kills a user's processes at logout (KillUserProcesses=yes): ask for "
        "`loginctl enable-linger {}`, or jobs end with your last session".format(user)
    ]
