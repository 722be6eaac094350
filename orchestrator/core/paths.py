"""Where orch keeps things on the laptop, and where it looks for an inventory. The only file that knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import platformdirs

APP = "orchestrator"


def orch_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder of the local ledger: ``ORCH_HOME``, else the user's data folder."""
    given = environ.get("ORCH_HOME")
    return Path(given).expanduser() if given else Path(platformdirs.user_data_dir(APP, appauthor=False))


def ledger_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The SQLite file of jobs seen from this laptop."""
    return orch_home(environ) / "ledger.sqlite3"


def user_inventory() -> Path:
    """The inventory of the user's configuration folder, which may not exist."""
    return Path(platformdirs.user_config_dir(APP, appauthor=False)) / "inventory.yaml"


def inventory_candidates(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Places of an inventory, the first existing one counts; only one when ``ORCH_INVENTORY`` names it."""
    given = environ.get("ORCH_INVENTORY")
    if given:
        return [Path(given).expanduser()]
    return [Path("inventory.yaml"), user_inventory()]
