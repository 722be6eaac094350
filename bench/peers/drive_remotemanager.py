"""remotemanager: a function as a Dataset over a URL, `run()`, then `wait()` with its default interval of 10 s."""

import os
import shutil

from driving import ready, say, start
from remotemanager import URL, Dataset

verb, config = start()
os.chdir(config.folder)
# Its rsync does not hear of the port: an alias of an ssh configuration, as users have one, is what works for both.
program = config.folder / "bin" / "ssh"
program.parent.mkdir(exist_ok=True)
program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path=os.defpath)} -F "{config.ssh_config}" -o BatchMode=yes "$@"\n')
program.chmod(0o755)
os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"


def work(payload, folder):
    """Runs on the host."""
    import runpy
    import sys

    sys.argv = [payload, folder]
    runpy.run_path(payload, run_name="__main__")


url = URL(host=config.alias, port=config.port, python=config.host_python)
dataset = Dataset(
    function=work, url=url, name=config.work.name, local_dir=str(config.folder / f"local-{config.work.name}"),
    remote_dir=f"{config.work}-remote", skip=verb == "attach", dbfile=f"db-{config.work.name}.yaml",
)  # fmt: skip
if verb == "run":
    dataset.append_run({"payload": config.payload, "folder": str(config.work)})
    ready()
    dataset.run()
try:
    dataset.wait(**config.options)
    dataset.fetch_results()
except Exception as error:  # its own words are the result
    say(f"ended gave-up {type(error).__name__} {str(error)[:150]!r}")
else:
    failed = bool(dataset.failed) or any(dataset.errors or [])
    say(f"ended {'failed' if failed else 'ok'} {dataset.string_states} {str(dataset.errors)[:100]!r}")
