"""Words that become part of a command line reach the program unchanged: property tests with the real shells."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.errors import ConfigError
from orchestrator.hosts import openssh, release
from remote_jobs import protocol
from remote_jobs.agent import command, reboot
from remote_jobs.agent.jobdir import JobDir, Layout

SHELLS = [path for name in ("sh", "dash", "bash") if (path := shutil.which(name))]
NAMES = st.text(st.characters(exclude_characters="\0/", exclude_categories=("Cs",)), min_size=1, max_size=30) | st.text(
    alphabet="'\"\\$`!;&|<>(){}[]*?~# \t\n%-=a", min_size=1, max_size=20
)
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
ECHO = [sys._base_executable, "-I", "-S", "-c", "import sys,json; print(json.dumps(sys.argv[1:]))"]  # type: ignore[attr-defined]


def words_of(shell: str, line: str) -> list[str]:
    """What a program sees as its arguments when a shell runs this line."""
    done = subprocess.run([shell, "-c", line], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    assert done.stderr == b""
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


@SLOW
@given(st.lists(NAMES, min_size=3, max_size=3), st.sampled_from(SHELLS))
def test_placeholders_of_a_run_line(names: list[str], shell: str) -> None:
    """{workdir}, {files} and {steps.x.output} are one word each, whatever they hold."""
    root, work, output = names
    steps = [
        protocol.to_dict(protocol.StepSpec(name="first", run="true", output=output)),
        protocol.to_dict(protocol.StepSpec(name="work", run="x")),
    ]
    spec = protocol.JobSpec(
        id="j", name="p", host="h", workdir=f"/w/{work}", plan_sha256="", created_at="", release="", steps=steps
    )
    places = command.Places(spec, JobDir(f"/{root}/jobs/j", f"/{root}"))
    line = places.fill("{workdir} {files} {steps.first.output} {not.ours}", shlex.quote)
    expected = [places.workdir, places.files, places.output("first"), "{not.ours}"]
    assert words_of(shell, f"{shlex.join(ECHO)} {line}") == expected


@SLOW
@given(st.lists(NAMES, min_size=1, max_size=4), st.sampled_from(SHELLS))
def test_the_line_offered_for_a_reboot(names: list[str], shell: str) -> None:
    """What `restart_after_reboot` tells people to type: crontab's own % is escaped, all else is one word each."""
    layout = Layout("/" + "/".join(names))
    quoted = " ".join(shlex.quote(word) for word in reboot.argv(layout))
    assert words_of(shell, f"{shlex.join(ECHO)} {quoted}") == reboot.argv(layout)


@SLOW
@given(NAMES, NAMES, st.sampled_from(SHELLS))
def test_the_bootstrap_runs_nothing_of_a_path(tmp_path_factory: pytest.TempPathFactory, root: str, python: str, shell: str) -> None:
    """Root and agent_python of the inventory, as text of a remote command line, start nothing by themselves."""
    folder = tmp_path_factory.getbasetemp() / "quoting"
    folder.mkdir(exist_ok=True)
    line = release.bootstrap(release.build(), f"{folder}/{root}", f"{folder}/{python}")
    done = subprocess.run(
        [shell, "-c", line], capture_output=True, stdin=subprocess.DEVNULL, cwd=folder, check=False, env={"PATH": "/bin:/usr/bin", "HOME": "/nowhere"}
    )
    said = [json.loads(text, strict=False) for text in done.stdout.decode(errors="replace").splitlines() if text.startswith("{")]
    assert [item["error"] for item in said] == ["no_python"], done
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("name", ["-oProxyCommand=touch owned", "-F/etc/passwd", "me@-oProxyCommand=x", "--", "a b", "x;y", "$(x)"])
def test_no_host_name_is_an_option_of_ssh(name: str) -> None:
    """Of a name from the inventory ssh sees a destination, behind `--`, or it is refused before."""
    try:
        argv = openssh.command_line(name, "true", identity_file=None, known_hosts=None)
    except ConfigError:
        return
    assert argv[-3] == "--"
    assert argv[-2] == name


@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), st.text(max_size=20), max_size=4))
def test_parameters_of_built_in_steps_are_argv_not_shell(params: dict[str, str]) -> None:
    argv = command.flags(params)
    assert [argv[at + 1] for at in range(0, len(argv), 2)] == list(params.values())


def test_a_job_id_never_leaves_the_jobs_folder(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path))
    for name in ("", ".", "..", "../x", "a/b", "/etc", ".hidden", "a\0b"):
        with pytest.raises(ValueError, match="not a job id"):
            layout.job(name)
