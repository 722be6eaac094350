"""Going on after a reboot of the host: what a person may type to have it, and the start that it leads to.

Nothing is ever installed here: with `restart_after_reboot: true` the line is offered (launch, status, why), and it
starts `resume`, which takes up every such job of this root that a reboot cut short.  Standard library only.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from typing import List, Optional

from remote_jobs import protocol
from remote_jobs.agent import procs
from remote_jobs.agent.command import release_dir
from remote_jobs.agent.fold import fold
from remote_jobs.agent.jobdir import JobDir, Layout, lock_holder

COMMAND = "resume"
UNIT = "orch-resume.service"


def argv(layout: Layout) -> List[str]:
    """The command that takes up this root's jobs; the agent's own interpreter and release."""
    entry = release_dir()
    if not os.path.exists(os.path.join(entry, "__main__.py")):
        entry = os.path.join(entry, "remote_jobs", "agent", "__main__.py")
    return [sys.executable, "-I", "-S", entry, COMMAND, "--root", layout.root]


def offer(layout: Layout, spec: protocol.JobSpec) -> Optional[str]:
    """What to type on the host so that this job goes on after a reboot; None when not wanted or there already."""
    if not spec.restart_after_reboot or installed(layout):
        return None
    command = " ".join(shlex.quote(word) for word in argv(layout))
    if shutil.which("crontab"):
        line = "@reboot {}".format(command.replace("%", "\\%"))  # crontab(5): a bare % is a newline
        typed = "(crontab -l 2>/dev/null; echo {}) | crontab -".format(shlex.quote(line))
    elif shutil.which("systemctl"):
        exec_start = "ExecStart={}".format(command.replace("%", "%%"))
        lines = ["[Service]", "Type=oneshot", "RemainAfterExit=yes", "KillMode=process", exec_start, "[Install]"]
        content = " ".join(shlex.quote(line) for line in [*lines, "WantedBy=default.target"])
        typed = (
            "mkdir -p ~/.config/systemd/user && printf '%s\\n' {content} > ~/.config/systemd/user/{unit} "
            "&& systemctl --user enable {unit} && loginctl enable-linger"
        ).format(content=content, unit=UNIT)
    else:
        return "restart_after_reboot: this host has neither crontab nor systemd; after a reboot type: orch retry {}".format(
            spec.id
        )
    return "restart_after_reboot: nothing is installed on the host yet; to have it, type there: {}".format(typed)


def installed(layout: Layout) -> bool:
    """True when the user's crontab or user unit already takes up this root."""
    texts = []
    try:
        listed = subprocess.run(
            ["crontab", "-l"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5,
            check=False,
        )  # fmt: skip
        texts.append(listed.stdout.decode("utf-8", "replace"))
    except (OSError, subprocess.TimeoutExpired):
        pass
    try:
        with open(os.path.expanduser("~/.config/systemd/user/" + UNIT), encoding="utf-8") as file:
            texts.append(file.read())
    except (OSError, ValueError):
        pass
    lines = [line for text in texts for line in text.splitlines() if not line.lstrip().startswith("#")]
    return any(" {} ".format(COMMAND) in line and layout.root in line for line in lines)


def resume(layout: Layout) -> List[str]:
    """Start a supervisor for every job that a reboot cut short and whose plan wants it; their ids."""
    taken = []
    for job_id in layout.job_ids():
        try:
            job = layout.job(job_id)
            spec = job.spec()
            if not spec.restart_after_reboot or not cut_short(job, spec):
                continue
            _start(layout, job, spec)
        except (OSError, ValueError) as exc:
            sys.stderr.write("{}: {}\n".format(job_id, exc))
            continue
        taken.append(job_id)
    return taken


def cut_short(job: JobDir, spec: protocol.JobSpec) -> bool:
    """True for a job without final event and supervisor whose last supervisor belonged to another boot."""
    if lock_holder(job.lock_path())[0]:
        return False
    events = job.read_events()
    boots = [
        (data.get("supervisor") or {}).get("boot_id")
        for data in (event.get("data") or {} for event in events)
        if data.get("supervisor")
    ]
    over = fold(spec, events).state["state"] in protocol.JOB_TERMINAL
    return bool(boots) and boots[-1] != procs.boot_id() and not over


def _start(layout: Layout, job: JobDir, spec: protocol.JobSpec) -> None:
    """A supervisor of the job's own release, where that is still there."""
    words = argv(layout)
    own = os.path.join(layout.releases, spec.release or "-", "__main__.py")
    if os.path.exists(own):
        words[3] = os.path.dirname(own)
    words[4:] = ["supervise", "--root", layout.root, "--job", job.id]
    subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60, check=False)
