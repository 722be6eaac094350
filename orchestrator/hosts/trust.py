"""Is this really the host? Strict judgement of host keys, the same for every transport of ours.

An unknown key is refused with its fingerprint and the command that accepts it; a changed or revoked key is refused
loudly.  ``StrictHostKeyChecking no`` in the user's configuration does not change that: secrets and scripts travel here.
A host certificate signed by a @cert-authority of the user's files is accepted when it names the host and is valid.
"""

from __future__ import annotations

import base64
import contextlib
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, ssh

from orchestrator.core.errors import HostKeyChanged, HostKeyUnknown, LocalError
from orchestrator.hosts.known_hosts import (
    HostNames,
    KnownHosts,
    Trust,
    append,
    blob_type,
    fingerprint,
    pattern_match,
)
from orchestrator.hosts.ssh_config import ResolvedHost

CERTIFICATE_SUFFIX = "-cert-v01@openssh.com"
KRL_MAGIC = b"SSHKRL\n\0"
RSA_ALGORITHMS = ("rsa-sha2-512", "rsa-sha2-256")


class HostTrust:
    """What the user's files say about one host.

    Args:
        host: inventory name, for messages and commands.
        resolved: the host (or jump host) that is being connected to.
    """

    def __init__(self, host: str, resolved: ResolvedHost) -> None:
        self.host = host
        self.resolved = resolved
        self.names = HostNames.of(resolved.hostname, resolved.port, resolved.host_key_alias)
        self.known = KnownHosts.load((*resolved.user_known_hosts, *resolved.global_known_hosts))

    def algorithms(self, supported: tuple[str, ...]) -> tuple[str, ...]:
        """Host key algorithms to offer: certificates if an authority is known for the host, then those of the known
        keys, then the rest.
        """
        known = [algo for kind in self.known.key_types(self.names) for algo in _algorithms_of(kind)]
        plain = [algo for algo in known if algo in supported]
        plain += [algo for algo in supported if algo not in plain]
        if self.known.authorities(self.names):
            return tuple(algo + CERTIFICATE_SUFFIX for algo in plain) + tuple(plain)
        return tuple(plain)

    def verify(self, key_type: str, blob: bytes) -> None:
        """Accept the key that the host showed, or raise.

        Args:
            key_type: type name of the key, such as ssh-ed25519.
            blob: wire form of the key, or of the certificate.

        Raises:
            HostKeyUnknown: nothing is known about this host.
            HostKeyChanged: another key is known, or this one was revoked.
        """
        if key_type.endswith(CERTIFICATE_SUFFIX):
            reason = self._certificate_fault(blob)
            if reason is None:
                return
            key_type, blob = _certified_key(blob)
        else:
            reason = None
        verdict = self.known.check(self.names, key_type, blob)
        label, shown = self.resolved.label, f"{key_type} {fingerprint(blob)}"
        marked = verdict.trust is Trust.REVOKED
        if marked or self._in_revocation_list(blob):
            where = verdict.entries[0].place if marked else self.resolved.revoked_host_keys
            raise HostKeyChanged(
                f"{self.host}: THE HOST KEY OF {label} IS REVOKED ({where}): {shown}. Nothing was sent.",
                "someone has the host's private key: ask its administrator for the new fingerprint",
                host=self.host,
            )
        if verdict.trust is Trust.CHANGED:
            expected = "; ".join(
                f"{e.key_type} {fingerprint(e.blob)} ({e.place})" for e in verdict.entries[:4]
            )
            files = dict.fromkeys(entry.path for entry in verdict.entries)
            remove = " && ".join(
                f"ssh-keygen -R {shlex.quote(self.names.main)} -f {shlex.quote(f)}" for f in files
            )
            raise HostKeyChanged(
                f"{self.host}: THE HOST KEY OF {label} HAS CHANGED. Known: {expected}. Shown now: {shown}. "
                "Either the host was reinstalled, or someone sits in between. Nothing was sent.",
                f"if you know why it changed: {remove} && {accepting(self.host)}",
                host=self.host,
            )
        if verdict.trust is Trust.UNKNOWN:
            because = f" (its certificate was not accepted: {reason})" if reason else ""
            files_read = (
                ", ".join((*self.resolved.user_known_hosts, *self.resolved.global_known_hosts)) or "no file"
            )
            raise HostKeyUnknown(
                f"{self.host}: the host key of {label} is not known: {shown}{because}. Looked in {files_read}.",
                f"compare the fingerprint with the host's, then type: {accepting(self.host)}",
                host=self.host,
            )

    def accept(self, key_type: str, blob: bytes) -> str:
        """Remember a key that is not known yet, in the user's first known_hosts file; what was written, for people.

        Raises:
            HostKeyChanged: another key is known for the host: accepting needs a person to remove that one first.
            LocalError: there is no file to write to, or it cannot be written.
        """
        try:
            self.verify(key_type, blob)
        except HostKeyUnknown:
            if key_type.endswith(CERTIFICATE_SUFFIX):
                key_type, blob = _certified_key(blob)
            if not self.resolved.user_known_hosts:
                raise LocalError(
                    "your ssh config names no UserKnownHostsFile to remember the key in"
                ) from None
            path = self.resolved.user_known_hosts[0]
            append(path, self.names, key_type, blob, hashed=self.resolved.hash_known_hosts)
            self.known = KnownHosts.load((*self.resolved.user_known_hosts, *self.resolved.global_known_hosts))
            return f"{self.resolved.label} {key_type} {fingerprint(blob)} -> {path}"
        return ""

    def _certificate_fault(self, blob: bytes) -> str | None:
        """Why a host certificate is not accepted, or None when it is (PROTOCOL.certkeys of OpenSSH)."""
        try:
            certificate = ssh.load_ssh_public_identity(_text(blob))
            if not isinstance(certificate, ssh.SSHCertificate):
                return "it is no certificate"
            signer = certificate.signature_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            certificate.verify_cert_signature()
        except Exception as error:  # cryptography raises half a dozen kinds for malformed or forged input
            return f"it cannot be verified ({type(error).__name__})"
        name = self.names.bare or self.names.main
        principals = [
            principal.decode("utf-8", "replace").lower() for principal in certificate.valid_principals
        ]
        if certificate.type is not ssh.SSHCertificateType.HOST:
            return "it is a user certificate"
        if not certificate.valid_after <= time.time() < certificate.valid_before:
            return "it is outside its validity period"
        if not any(pattern_match(principal, name) for principal in principals):
            return f"it is for {', '.join(principals) or 'nobody'}, not for {name}"
        if certificate.critical_options:
            return "it has critical options that we do not know"
        signer_blob = _blob(signer)
        if any(entry.marker == "@revoked" and entry.blob == signer_blob for entry in self.known.entries):
            return "its authority is revoked"
        if not any(entry.blob == signer_blob for entry in self.known.authorities(self.names)):
            return "its authority is not one of the @cert-authority lines"
        key_type, key = _certified_key(blob)
        if self.known.check(self.names, key_type, key).trust is Trust.REVOKED or self._in_revocation_list(
            key
        ):
            return "its key is revoked"
        return None

    def _in_revocation_list(self, blob: bytes) -> bool:
        """Is the key in RevokedHostKeys, a list of keys or a KRL? What cannot be read or asked counts as revoked."""
        path = self.resolved.revoked_host_keys
        if not path:
            return False
        try:
            content = Path(path).read_bytes()
            if not content.startswith(KRL_MAGIC):
                lines = (line.split() for line in content.splitlines())
                return any(len(line) > 1 and _blob(b" ".join(line[:2])) == blob for line in lines)
            with tempfile.TemporaryDirectory() as folder:
                public = Path(folder) / "key.pub"
                public.write_bytes(_text(blob) + b"\n")
                asked = subprocess.run(
                    ["ssh-keygen", "-Q", "-f", path, str(public)],
                    capture_output=True,
                    timeout=20,
                    check=False,
                )
                return asked.returncode != 0
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return True


def accepting(host: str) -> str:
    """The command that keeps the key of a host of the inventory."""
    return f"orch hosts check --accept-new {shlex.quote(host)}"


def _algorithms_of(key_type: str) -> tuple[str, ...]:
    return RSA_ALGORITHMS if key_type == "ssh-rsa" else (key_type,)


def _text(blob: bytes) -> bytes:
    """The one-line form (``type base64``) of a key or certificate."""
    return blob_type(blob).encode("ascii") + b" " + base64.b64encode(blob)


def _blob(text: bytes) -> bytes:
    """The wire form of a one-line key."""
    return base64.b64decode(text.split()[1])


def _certified_key(blob: bytes) -> tuple[str, bytes]:
    """Type and wire form of the plain key inside a certificate; the certificate itself when it is unreadable."""
    with contextlib.suppress(Exception):  # malformed: judged as the unknown key that it is
        loaded = ssh.load_ssh_public_identity(_text(blob))
        if isinstance(loaded, ssh.SSHCertificate):
            blob = _blob(loaded.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return blob_type(blob), blob
