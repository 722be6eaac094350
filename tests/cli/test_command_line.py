"""The command line itself: help, usage errors as text and as JSON, exit statuses, completion, a quick start."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from orchestrator.cli.app import app
from orchestrator.cli.commands import TABLE, help_text
from orchestrator.cli.main import main
from orchestrator.cli.options import seconds
from orchestrator.core import yaml
from orchestrator.core.errors import UsageError
from orchestrator.core.inventory import inventory_of
from orchestrator.services.init import inventory_text
from tests.support.laptop import ORCH, Laptop

COMMANDS = list(TABLE)
NEEDS_HELP = [[name] for name in COMMANDS] + [["hosts", "check"]]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(list(arguments))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_in_the_help_is_the_commands_own(name: str) -> None:
    """`orch --help` does not import the commands: correct TABLE in orchestrator/cli/commands.py when this fails."""
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    assert command.get_short_help_str(1000).rstrip(".") == TABLE[name][1].rstrip(".")


def test_the_quick_help_is_the_real_one(capsys: pytest.CaptureFixture[str]) -> None:
    app(args=["--help"], prog_name="orch", standalone_mode=False)
    assert capsys.readouterr().out == help_text()


def test_every_registered_command_is_in_the_table() -> None:
    """A module's second command must not be forgotten."""
    for module in {module for module, _ in TABLE.values()}:
        small = typer.Typer()
        import_module(f"orchestrator.cli.{module}").register(small)
        names = {item.name or item.callback.__name__ for item in small.registered_commands if item.callback}
        names |= {item.typer_instance.info.name for item in small.registered_groups if item.typer_instance}
        assert names == {name for name, (home, _) in TABLE.items() if home == module}


@pytest.mark.parametrize("command", NEEDS_HELP, ids=" ".join)
def test_help_explains_every_option(capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    status, out, err = run(capsys, *command, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: orch {' '.join(command)}")
    assert "..." not in re.sub(r"\[\w+\]\.\.\.", "", out.split("Examples:")[0])
    group: Any = typer.main.get_command(app)
    for name in command:
        group = group.commands[name] if hasattr(group, "commands") else group
    for parameter in group.params:
        if parameter.name != "help":
            assert getattr(parameter, "help", None), f"{command}: {parameter.name} has no help"


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name != "hosts"] + ["hosts check"], ids=str
)
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    _, out, _ = run(capsys, *command.split(), "--help")
    examples = out.partition("Examples:")[2]
    assert f"orch {command}" in examples


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (["lanch"], "no such command 'lanch'. Did you mean 'launch'", "see: orch --help"),
        (["launch"], "missing argument 'PLAN'", "see: orch launch --help"),
        (["launch", "p.yaml", "--hst", "x"], "no such option: --hst", "see: orch launch --help"),
        (["hosts", "chek"], "no such command 'chek'", "see: orch hosts --help"),
        (["logs", "j", "--tail", "many"], "--tail", "see: orch logs --help"),
        (["wait", "j", "--timeout", "soon"], "--timeout 'soon' is not a time", "write seconds, or 90s, 30m"),
        (["fetch", "j", ""], "DEST is empty", "name a folder, such as results/; the current one is `.`"),
        (["completion", "tcsh"], "'tcsh' is not one of", "see: orch completion --help"),
        ([], "a command is missing", "see: orch --help"),
        (["launch", "nowhere.yaml"], "nowhere.yaml", ""),
    ],
)
def test_wrong_usage_is_status_2_with_a_hint(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str, hint: str
) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert hint in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "--json", "--hst"],
        ["lanch", "--json"],
        ["launch", "--json"],
        ["launch", "nowhere.yaml", "--json"],
        ["wait", "j", "--timeout", "soon", "--json"],
        ["status", "--json", "--inventory", "nowhere.yaml"],
    ],
)
def test_a_failure_in_json_mode_is_one_document(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    status, out, err = run(capsys, *arguments)
    assert status == 2
    document = json.loads(out)
    assert document["schema"] == 1
    assert set(document["error"]) == {"code", "message", "hint"}
    assert document["error"]["code"] in {"usage", "config"}
    assert err.startswith("orch: ")


def test_json_after_a_double_dash_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "launch", "--", "--json")
    assert status == 2
    assert out == ""


@pytest.mark.parametrize(("text", "expected"), [(None, None), ("90", 90), ("0.5", 0.5), ("90s", 90), ("30m", 1800), ("1h30m", 5400)])
def test_times(text: str | None, expected: float | None) -> None:
    assert seconds(text, "--timeout") == expected


@pytest.mark.parametrize("text", ["", "-1", "x", "5 parsecs", "nan", "1e400"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        seconds(text, "--timeout")


def test_start_loads_nothing_heavy() -> None:
    """`orch --help` and completion answer at once because these stay out until a command needs them."""
    script = (
        "import sys, orchestrator.cli.main as m; m.main(['--help']); "
        "print([n for n in ('paramiko', 'fabric', 'pydantic', 'rich', 'ruamel.yaml', 'sqlite3') if n in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_help_is_quick() -> None:
    best = 9.0
    for _ in range(5):
        began = time.monotonic()
        subprocess.run([ORCH, "--help"], stdout=subprocess.DEVNULL, check=True)
        best = min(best, time.monotonic() - began)
        if best < 0.3:
            return
    # The bound is for an idle machine; on a loaded one the interpreter's own start is the yardstick.
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import typer"], check=True)
    assert best < 3 * (time.monotonic() - began)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_scripts(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    status, out, _ = run(capsys, "completion", shell)
    assert status == 0
    assert "_ORCH_COMPLETE" in out
    assert "orch" in out


def complete(laptop: Laptop, words: str) -> list[str]:
    done = subprocess.run(
        [ORCH],
        capture_output=True,
        text=True,
        cwd=laptop.folder,
        env={**laptop.environment, "_ORCH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))},
        check=False,
    )
    return done.stdout.split()


def test_completion_knows_commands_hosts_and_plans(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, {"gpubox": {"ssh": "gpubox"}, "cluster": {"ssh": "login1"}})
    laptop.plan([{"name": "a", "run": "true"}], name="extract")
    assert complete(laptop, "orch la") == ["launch"]
    assert complete(laptop, "orch gpus g") == ["gpubox"]
    assert complete(laptop, "orch launch --host ") == ["gpubox", "cluster"]
    assert complete(laptop, "orch launch ex") == ["extract.yaml"]


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, {"gpubox": {"ssh": "gpubox"}})
    done = subprocess.run(
        f"{ORCH} hosts | true; echo ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash", capture_output=True, text=True, env=laptop.environment, check=True
    )
    assert "Traceback" not in done.stderr
    assert done.stderr in ("", f"from {laptop.inventory}\n")
    assert done.stdout.strip() in ("0", "141")


def test_hosts_lists_the_inventory_without_connecting(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, {"gpubox": {"ssh": "nobody@127.0.0.1:9", "gpus": 8}})
    answer = laptop.run("hosts", expect=0)
    assert answer.out.splitlines() == [
        "HOST    SSH                 GPUS  ROOT             SCHEDULER  TRANSPORT",
        "gpubox  nobody@127.0.0.1:9  8     ~/.orchestrator  direct     paramiko",
    ]
    assert laptop.run("hosts", "--json", expect=0).json == {
        "schema": 1,
        "inventory": str(laptop.inventory),
        "hosts": [{"name": "gpubox", "ssh": "nobody@127.0.0.1:9", "gpus": 8, "root": "~/.orchestrator", "scheduler": "direct", "transport": "paramiko"}],
    }


def test_inventory_option_works_before_and_after_the_command(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, {"gpubox": {"ssh": "gpubox"}})
    del laptop.environment["ORCH_INVENTORY"]
    other = tmp_path / "elsewhere.yaml"
    os.replace(laptop.inventory, other)
    assert laptop.run("hosts").status == 2
    assert "gpubox" in laptop.run("--inventory", other, "hosts", expect=0).out
    assert "gpubox" in laptop.run("hosts", "--inventory", other, expect=0).out


def test_a_bug_of_ours_is_called_that(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.delenv("ORCH_DEBUG", raising=False)
    monkeypatch.setattr("orchestrator.services.session.Session.__init__", broken)
    status, out, err = run(capsys, "status", "--json")
    assert status == 70
    assert json.loads(out)["error"]["code"] == "internal"
    assert "a bug in orch" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("closing", "status", "said"),
    [(">/dev/full", 2, "orch: the output cannot be written: No space left on device"), (">&-", 0, ""), (">&- 2>&- <&-", 0, "")],
)
def test_an_output_that_takes_nothing_is_no_traceback(closing: str, status: int, said: str) -> None:
    """A full disk behind `>`, and streams that whoever started orch has closed (cron, a daemon)."""
    command = f"{shlex.quote(ORCH)} explain {os.devnull} {closing}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stderr.split("\n")[0]) == (status, said)


@pytest.mark.parametrize("closing", [">/dev/full", "2>&1 >/dev/full", ">/dev/full 2>/dev/full"])
@pytest.mark.parametrize("form", ["", "--json"])
def test_a_large_answer_that_cannot_be_written_is_no_traceback(tmp_path: Path, form: str, closing: str) -> None:
    """More than one buffer: it fails while it is written, and then the error's own document cannot be written either."""
    log = tmp_path / "big.log"
    log.write_text("".join(f"Epoch {number}/4000: 100%|#####| 14/14 [00:01<00:00, 10it/s]\n" for number in range(4000)))
    command = shlex.join([ORCH, "explain", str(log)])
    if form:
        assert len(subprocess.run([*shlex.split(command), form], capture_output=True, check=True).stdout) > 65536
    done = subprocess.run(["/bin/sh", "-c", f"{command} {form} {closing}"], capture_output=True, text=True, check=False)
    said = [] if "2>/dev/full" in closing else ["orch: the output cannot be written: No space left on device", "  jobs on hosts are not affected"]
    assert (done.returncode, (done.stderr + done.stdout).splitlines()) == (2, said)


def test_a_reader_gone_before_an_error_is_no_traceback(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([ORCH, "launch", "no.yaml", "--json"], stdout=writing, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path)
    os.close(writing)
    assert (done.returncode, done.stderr.splitlines()[0]) == (2, "orch: no.yaml: no such plan file")


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        ({"PYTHONIOENCODING": "utf-8"}, "ValueError: naïve — Ошибка ███░ …"),
        ({"PYTHONIOENCODING": "cp1252"}, "ValueError: naïve — ?????? @@@x …"),
        ({"PYTHONIOENCODING": "latin-1"}, "ValueError: naïve - ?????? @@@x ~"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "ValueError: na?ve - ?????? @@@x ~"),
    ],
    ids=str,
)
def test_what_the_streams_encoding_lacks_ends_no_command(tmp_path: Path, environment: dict[str, str], shown: str) -> None:
    """A pipe on Windows, or a shell without UTF-8; on stderr as on stdout."""
    log = tmp_path / "a.log"
    log.write_text("ValueError: naïve — Ошибка ███░ …\n", encoding="utf-8")
    done = subprocess.run([ORCH, "explain", log], capture_output=True, check=False, env={**os.environ, **environment})
    encoding = environment.get("PYTHONIOENCODING", "ascii")
    assert (done.returncode, done.stderr) == (0, b"")
    assert f"line 1: {shown}" in done.stdout.decode(encoding)
    wrong = subprocess.run([ORCH, "explain", log, "█"], capture_output=True, check=False, env={**os.environ, **environment})
    assert wrong.returncode == 2
    assert "orch: " in wrong.stderr.decode(encoding)


# ------------------------------------------------------------------------------------- a folder that may not be read


class Powerless(Laptop):
    """A laptop whose user is not root, even where the tests run as root: file modes count."""

    def __init__(self, folder: Path) -> None:
        powers = "-dac_override,-dac_read_search"
        prefix = ("setpriv", f"--bounding-set={powers}", f"--inh-caps={powers}") if os.geteuid() == 0 else ()
        super().__init__(folder, {"box": {"ssh": "nobody@127.0.0.1:9"}}, command_prefix=prefix)

    @contextlib.contextmanager
    def locked(self, folder: Path) -> Iterator[None]:
        """The folder cannot be looked into."""
        folder.mkdir(exist_ok=True)
        mode = folder.stat().st_mode
        folder.chmod(0)
        try:
            yield
        finally:
            folder.chmod(mode)


def test_init_beside_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    laptop = Powerless(tmp_path)
    laptop.inventory.unlink()
    with laptop.locked(tmp_path / "plans"):
        assert laptop.run("init", "box", expect=2).err == "orch: plans/first.yaml cannot be read: Permission denied\n"
    assert not laptop.inventory.exists()


@pytest.mark.parametrize("command", ["status", "gpus", "hosts"])
def test_an_inventory_in_a_folder_that_may_not_be_read(tmp_path: Path, command: str) -> None:
    laptop = Powerless(tmp_path)
    del laptop.environment["ORCH_INVENTORY"]
    with laptop.locked(tmp_path / "here"):
        (tmp_path / "here").chmod(0o755)  # for the shell to enter
        entering = f"cd {shlex.quote(str(tmp_path / 'here'))}; chmod 0 ."
        script = f"{entering}; exec {shlex.join([*laptop.command_prefix, ORCH, command])}"
        done = subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=False, env=laptop.environment)
    assert (done.returncode, done.stderr) == (2, "orch: inventory.yaml: cannot read the inventory: Permission denied\n")


def test_doctor_tells_what_may_not_be_read(tmp_path: Path) -> None:
    laptop = Powerless(tmp_path)
    with laptop.locked(laptop.home / ".ssh"), laptop.locked(laptop.store):
        report = laptop.run("doctor", "--json", "--no-hosts", expect=0).json
    assert report["files"]["ledger"]["error"] == "Permission denied"


def test_files_in_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    laptop = Powerless(tmp_path)
    (tmp_path / "empty").mkdir()
    plan = laptop.plan([{"name": "a", "run": "true", "files": ["private", "private/*.py", "empty"]}])
    with laptop.locked(tmp_path / "private"):
        told = laptop.run("launch", plan, expect=2).err
    assert "'private' cannot be read: [Errno 13] Permission denied" in told
    assert "'private/*.py' cannot be read: [Errno 13] Permission denied" in told
    assert "the folder 'empty' holds no files" in told
    assert "did you mean" not in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["box", "--name", "a b/../c"], "orch: 'a b/../c' cannot be a host's name"),
        (["box", "--name", "x" * 101], "cannot be a host's name"),
        (["box", "--root", "data"], "orch: hosts.box.root: 'data' must be an absolute path on the host"),
        (["a box"], "orch: hosts.a-box.ssh: 'a box' is not an ssh destination"),
    ],
)
def test_init_writes_no_inventory_that_orch_would_refuse(tmp_path: Path, arguments: list[str], told: str) -> None:
    laptop = Laptop(tmp_path, {})
    answer = laptop.run("init", *arguments, "-C", "new", expect=2)
    assert told in answer.err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["box", "True", "NULL", "12", "1e3", "yes"])
def test_the_inventory_of_init_keeps_the_hosts_name(name: str) -> None:
    """And what the host says of itself stays in the comment."""
    text = inventory_text(name, {"ssh": "box"}, {"hostname": "a\nhosts: {evil: {}}\u2028", "os": "b\rc\x85d"})
    assert list(inventory_of(yaml.parse(text), Path("inventory.yaml")).hosts) == [name]


# -------------------------------------------------------------------------------------------------------------- Ctrl-C

INTERRUPTED = """
import os, signal, sys
sys.argv = ["/usr/bin/orch", "status"]
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
from orchestrator.cli.main import main
sys.exit(main())
"""
IN_A_CALLBACK = """
import os, signal, sys, time, weakref
sys.argv = ["/usr/bin/orch"]
from orchestrator.cli import interrupt
interrupt.started()
until = time.monotonic() + 20
class Thing: pass
thing = Thing()
code = "def cb(_ref):\\n    os.kill(os.getpid(), signal.SIGINT)\\n    for _ in range(100): pass"
exec(compile(code, "<frozen importlib._bootstrap>", "exec"))
kept = weakref.ref(thing, cb)
try:
    del thing
    while time.monotonic() < until: pass
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("module", ["orchestrator.cli.main", "orchestrator.cli.commands", "orchestrator.cli.app", "typer"])
def test_ctrl_c_while_the_program_starts_is_130_without_a_word(tmp_path: Path, module: str) -> None:
    laptop = Laptop(tmp_path, {})
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(module=module)], capture_output=True, text=True, timeout=60, check=False,
        env=laptop.environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_later_is_130_with_a_word(tmp_path: Path) -> None:
    laptop = Laptop(tmp_path, {})
    program = INTERRUPTED.format(module="orchestrator.services.status")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=laptop.environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "orch: interrupted; jobs on hosts go on\n")


def test_ctrl_c_in_a_callback_of_an_import_is_not_lost() -> None:
    done = subprocess.run([sys.executable, "-c", IN_A_CALLBACK], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")
