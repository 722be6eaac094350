"""known_hosts files as OpenSSH reads them: each row is checked against `ssh-keygen -F` where that speaks about it."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from orchestrator.core.errors import HostKeyChanged, HostKeyUnknown, LocalError
from orchestrator.hosts.known_hosts import HostNames, KnownHosts, Trust, append, fingerprint, hash_name, parse
from orchestrator.hosts.ssh_config import ResolvedHost
from orchestrator.hosts.trust import HostTrust
from tests.sshd.server import make_key


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, bytes, str]]:
    """name -> (type, blob, `type base64` text) of some fresh keys."""
    folder = tmp_path_factory.mktemp("keys")
    found = {}
    for name, kind in (("ed", "ed25519"), ("ed2", "ed25519"), ("rsa", "rsa"), ("ec", "ecdsa")):
        make_key(folder / name, kind)
        text = " ".join((folder / f"{name}.pub").read_text().split()[:2])
        [entry] = parse(f"x {text}")
        found[name] = (entry.key_type, entry.blob, text)
    return found


ROWS = [
    # host field, host, port, does it speak about it?
    ("box", "box", 22, True),
    ("box", "BOX", 22, True),
    ("Box", "box", 22, True),
    ("box", "box2", 22, False),
    ("foo,box,bar", "box", 22, True),
    ("[box]:2222", "box", 2222, True),
    ("[box]:2222", "box", 22, False),
    ("[box]:2222", "box", 2223, False),
    ("*.lab", "gpu.lab", 22, True),
    ("*.lab,!bad.lab", "bad.lab", 22, False),
    ("!bad.lab,*.lab", "bad.lab", 22, False),
    ("!bad.lab", "good.lab", 22, False),
    ("[*.lab]:2222", "gpu.lab", 2222, True),
    ("[10.0.0.*]:22", "10.0.0.7", 22, False),
    ("gpu?", "gpu1", 22, True),
    ("gpu?", "gpu12", 22, False),
    ("b.x", "bax", 22, False),
    ("2001:db8::1", "2001:db8::1", 22, True),
    ("[2001:db8::1]:2200", "2001:db8::1", 2200, True),
]


@pytest.mark.parametrize(("field", "host", "port", "expected"), ROWS)
def test_which_line_speaks_about_which_host(
    field: str, host: str, port: int, expected: bool, keys: dict[str, tuple[str, bytes, str]], tmp_path: Path
) -> None:
    """Plain and hashed names, lists, negation, wildcards, ports; the same answer as ssh-keygen's."""
    kind, blob, text = keys["ed"]
    names = HostNames.of(host, port)
    verdict = KnownHosts(parse(f"{field} {text}")).check(HostNames(names.main), kind, blob)
    assert verdict.trust is (Trust.KNOWN if expected else Trust.UNKNOWN)
    file = tmp_path / "known_hosts"
    file.write_text(f"{field} {text}\n")
    asked = subprocess.run(["ssh-keygen", "-F", names.main, "-f", file], capture_output=True, check=False)
    assert (asked.returncode == 0) is expected, "ssh-keygen disagrees"


def test_hashed_names_are_those_of_ssh_keygen(
    keys: dict[str, tuple[str, bytes, str]], tmp_path: Path
) -> None:
    """Ours are found by ssh-keygen, its own are found by us."""
    kind, blob, text = keys["ed"]
    file = tmp_path / "known_hosts"
    file.write_text(f"[box]:2222 {text}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    assert "|1|" in file.read_text()
    names = HostNames.of("box", 2222)
    assert KnownHosts.load([str(file)]).check(names, kind, blob).trust is Trust.KNOWN
    file.write_text(f"{hash_name('gpu.lab')} {text}\n")
    asked = subprocess.run(["ssh-keygen", "-F", "gpu.lab", "-f", file], capture_output=True, check=False)
    assert asked.returncode == 0


def test_a_second_key_of_another_type_is_no_false_alarm(keys: dict[str, tuple[str, bytes, str]]) -> None:
    """A known ed25519 is asked for first, whatever other types the file or the host have."""
    known = KnownHosts(parse(f"box {keys['rsa'][2]}\nbox {keys['ed'][2]}\n"))
    names = HostNames.of("box", 22)
    assert known.key_types(names) == ["ssh-rsa", "ssh-ed25519"]
    assert known.check(names, *keys["ed"][:2]).trust is Trust.KNOWN
    assert known.check(names, *keys["ed2"][:2]).trust is Trust.CHANGED


def test_two_lines_for_one_host_are_alternatives(keys: dict[str, tuple[str, bytes, str]]) -> None:
    """As after a key rotation: either key of the same type is accepted."""
    known = KnownHosts(parse(f"box {keys['ed'][2]}\nbox {keys['ed2'][2]}\n"))
    for name in ("ed", "ed2"):
        assert known.check(HostNames.of("box", 22), *keys[name][:2]).trust is Trust.KNOWN


def test_markers_and_rubbish(keys: dict[str, tuple[str, bytes, str]]) -> None:
    """@revoked wins over a plain line; @cert-authority is no plain key; broken lines are skipped, not fatal."""
    text = "\n".join(
        [
            "# comment",
            "",
            "box",
            "box ssh-ed25519 !!!notbase64",
            f"box ssh-rsa {keys['ed'][2].split()[1]}",
            f"@unknown-marker box {keys['ed'][2]}",
            f"@cert-authority *.lab {keys['ec'][2]}",
            f"@revoked * {keys['ed'][2]}",
            f"box {keys['ed'][2]} a comment",
            "box ssh-ed25519",
        ]
    )
    known = KnownHosts(parse(text))
    names = HostNames.of("box", 22)
    assert len(known.entries) == 3
    assert known.check(names, *keys["ed"][:2]).trust is Trust.REVOKED
    assert known.check(HostNames.of("gpu.lab", 22), *keys["ec"][:2]).trust is Trust.UNKNOWN
    assert [entry.key_type for entry in known.authorities(HostNames.of("gpu.lab", 22))] == [keys["ec"][0]]


def test_another_port_may_fall_back_to_the_plain_name(keys: dict[str, tuple[str, bytes, str]]) -> None:
    """As in ssh: the same key under the plain name is good; another one there is not "changed"."""
    known = KnownHosts(parse(f"box {keys['ed'][2]}"))
    names = HostNames.of("box", 2222)
    assert known.check(names, *keys["ed"][:2]).trust is Trust.KNOWN
    assert known.check(names, *keys["ed2"][:2]).trust is Trust.UNKNOWN


def test_host_key_alias_replaces_name_and_port(keys: dict[str, tuple[str, bytes, str]]) -> None:
    """HostKeyAlias alone decides."""
    known = KnownHosts(parse(f"cluster {keys['ed'][2]}"))
    assert known.check(HostNames.of("10.0.0.9", 2222, "Cluster"), *keys["ed"][:2]).trust is Trust.KNOWN


def test_fingerprint_is_what_ssh_keygen_prints(
    keys: dict[str, tuple[str, bytes, str]], tmp_path: Path
) -> None:
    """People compare it by eye."""
    (tmp_path / "k.pub").write_text(keys["rsa"][2] + "\n")
    printed = subprocess.run(
        ["ssh-keygen", "-l", "-f", tmp_path / "k.pub"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.split()[1] == fingerprint(keys["rsa"][1])


@pytest.mark.parametrize("before", ["", "old ssh-ed25519 AAAA\n", "no newline at the end"])
def test_append_adds_one_whole_line(
    before: str, keys: dict[str, tuple[str, bytes, str]], tmp_path: Path
) -> None:
    """Whatever was there stays; the new line is found; a new file is private."""
    file = tmp_path / "new" / "known_hosts"
    if before:
        file.parent.mkdir()
        file.write_text(before)
    names = HostNames.of("box", 2222)
    append(str(file), names, *keys["ed"][:2])
    assert file.read_text().startswith(before)
    assert file.read_text().splitlines()[-1] == f"[box]:2222 {keys['ed'][2]}"
    assert KnownHosts.load([str(file)]).check(names, *keys["ed"][:2]).trust is Trust.KNOWN
    if not before:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_append_hashes_where_the_file_does(keys: dict[str, tuple[str, bytes, str]], tmp_path: Path) -> None:
    """A file with hashed names gets no name in clear."""
    file = tmp_path / "known_hosts"
    file.write_text(f"{hash_name('other')} {keys['ed2'][2]}\n")
    append(str(file), HostNames.of("box", 22), *keys["ed"][:2])
    assert "box" not in file.read_text()
    assert KnownHosts.load([str(file)]).check(HostNames.of("box", 22), *keys["ed"][:2]).trust is Trust.KNOWN


def test_what_cannot_be_written_or_read_is_said(
    keys: dict[str, tuple[str, bytes, str]], tmp_path: Path
) -> None:
    """/dev/null and folders are no place to remember a key in; an unreadable file is not an empty one."""
    with pytest.raises(LocalError, match="not a regular file"):
        append("/dev/null", HostNames.of("box", 22), *keys["ed"][:2])
    (tmp_path / "folder").mkdir()
    with pytest.raises(LocalError, match="cannot read"):
        KnownHosts.load([str(tmp_path / "folder")])
    assert KnownHosts.load([str(tmp_path / "missing")]).entries == ()


def trust(tmp_path: Path, text: str) -> HostTrust:
    """Judgement by one file."""
    file = tmp_path / "known_hosts"
    file.write_text(text)
    return HostTrust("gpubox", ResolvedHost("gpubox", "box", "me", user_known_hosts=(str(file),)))


def test_messages_tell_what_to_type(keys: dict[str, tuple[str, bytes, str]], tmp_path: Path) -> None:
    """Unknown: the fingerprint and the command that accepts. Changed: both fingerprints, the line, the way out."""
    with pytest.raises(HostKeyUnknown) as unknown:
        trust(tmp_path, "").verify(*keys["ed"][:2])
    assert fingerprint(keys["ed"][1]) in unknown.value.message
    assert "orch hosts check --accept-new gpubox" in str(unknown.value.hint)
    with pytest.raises(HostKeyChanged) as changed:
        trust(tmp_path, f"box {keys['ed2'][2]}\n").verify(*keys["ed"][:2])
    for name in ("ed", "ed2"):
        assert fingerprint(keys[name][1]) in changed.value.message
    assert f"{tmp_path}/known_hosts:1" in changed.value.message
    assert "ssh-keygen -R box" in str(changed.value.hint)


def test_the_known_types_are_preferred(keys: dict[str, tuple[str, bytes, str]], tmp_path: Path) -> None:
    """Order of host key algorithms offered: known ones, then the rest; certificates first when an authority is known."""
    supported = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256")
    assert trust(tmp_path, f"box {keys['rsa'][2]}\n").algorithms(supported) == (
        "rsa-sha2-512",
        "rsa-sha2-256",
        "ssh-ed25519",
        "ecdsa-sha2-nistp256",
    )
    offered = trust(tmp_path, f"@cert-authority b* {keys['ed'][2]}\n").algorithms(supported)
    assert offered[:2] == ("ssh-ed25519-cert-v01@openssh.com", "ecdsa-sha2-nistp256-cert-v01@openssh.com")
    assert offered[4:] == supported
