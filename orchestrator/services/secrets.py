"""Values of secrets, read on the laptop just before a launch; they travel beside the spec, never in it.

Nothing here is ever logged, and a message names the source, never the value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from orchestrator.core.errors import MissingSecret
from orchestrator.core.schema import Secret

MAX_SECRET_BYTES = 64 * 1024


def resolve_secrets(wanted: Mapping[str, Mapping[str, Secret]], base: Path) -> dict[str, dict[str, str]]:
    """``{step: {NAME: value}}`` for ``{step: {NAME: where it is}}``; relative files are looked for below ``base``.

    Raises:
        MissingSecret: a source gave nothing.
    """
    return {
        step: {name: secret_value(name, secret, base, f"step {step}") for name, secret in names.items()}
        for step, names in wanted.items()
        if names
    }


def secret_value(name: str, secret: Secret, base: Path, who: str) -> str:
    """The value of one secret; ``who`` needs it (``step extract``), for the message.

    Raises:
        MissingSecret: the source gave nothing.
    """
    key = secret.key or name
    what = f"{who} needs the secret {name}"
    if secret.source == "env":
        value = os.environ.get(key, "")
        if not value:
            raise MissingSecret(
                f"{what}, and the environment variable {key} is not set here",
                f"set it for this command: {key}=... orch launch ...",
            )
        return value
    if secret.source == "file":
        return _from_file(what, base / Path(key).expanduser())
    return _from_keyring(what, key)


def _from_file(what: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_SECRET_BYTES + 1)
        value = raw.decode("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise MissingSecret(
            f"{what}, and the file {path} cannot be read: {reason}", "check the path"
        ) from error
    if not value or len(raw) > MAX_SECRET_BYTES:
        raise MissingSecret(
            f"{what}, and the file {path} is {'empty' if not value else 'too large'}", "check the path"
        )
    return value


def _from_keyring(what: str, key: str) -> str:
    service, _, user = key.partition("/")
    try:
        import keyring
    except ImportError as error:
        raise MissingSecret(
            f"{what} from the keyring", "install it: pip install 'orch-gpu[keyring]'"
        ) from error
    try:
        value = keyring.get_password(service, user or "orch")
    except Exception as error:  # each keyring backend has its own errors
        raise MissingSecret(f"{what}, and the keyring failed: {type(error).__name__}: {error}") from error
    if not value:
        raise MissingSecret(
            f"{what}, and the keyring has nothing for {key}",
            f"store it: keyring set {service} {user or 'orch'}",
        )
    return str(value)
