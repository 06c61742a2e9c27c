"""Files of a cache folder that users share by a key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar.errors import AutoparError
from autopar.planning.cache_files import KEY_VARIABLE, read_cached, write_cached

TEXT = '{"a": 1}\n'


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a key, which the environment names."""
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    path.chmod(0o640)
    monkeypatch.setenv(KEY_VARIABLE, str(path))
    return path


def test_with_a_key_a_file_of_another_user_counts(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "x.json"
    write_cached(TEXT, path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    path.chmod(0o666)
    assert read_cached(path) == TEXT
    monkeypatch.delenv(KEY_VARIABLE)
    with pytest.raises(ValueError, match="it belongs to user"):
        read_cached(path)


def test_without_a_key_damage_and_another_name_are_found(tmp_path: Path) -> None:
    path, other = tmp_path / "x.json", tmp_path / "y.json"
    write_cached(TEXT, path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(bytes(byte ^ (each == at) for each, byte in enumerate(whole)))
        with pytest.raises(ValueError, match="is incomplete, or was written for another name"):
            read_cached(path)
    other.write_bytes(whole)
    with pytest.raises(ValueError, match=r"written for another name$"):
        read_cached(other)


def test_what_was_not_written_with_the_key_does_not_count(key: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "x.json", tmp_path / "y.json"
    write_cached(TEXT, path)
    sealed = path.read_bytes()
    forged = [TEXT.encode(), sealed.replace(b"1", b"2", 1), sealed[:-1], sealed[:-1] + bytes([sealed[-1] ^ 1]), b""]
    for content in forged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match="not written with the key"):
            read_cached(path)
    other.write_bytes(sealed)  # the answer to another question
    with pytest.raises(ValueError, match="not written with the key"):
        read_cached(other)
    path.write_bytes(sealed)
    key.write_bytes(bytes(32))
    with pytest.raises(ValueError, match="not written with the key"):
        read_cached(path)


def test_a_link_in_a_shared_folder_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """Who may make files in a cache folder could else have this user overwrite any of his own."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "own").write_text("mine")
    for name, target in (("a.json", tmp_path / "own"), ("b.json", tmp_path / "new")):
        path = tmp_path / "folder" / name
        path.symlink_to(target)
        write_cached(TEXT, path)
        assert read_cached(path) == TEXT and not path.is_symlink()
    assert (tmp_path / "own").read_text() == "mine" and not (tmp_path / "new").exists()


def test_a_pipe_in_a_shared_folder_is_not_waited_for(key: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(OSError, match="it is a pipe"):
        read_cached(tmp_path / "x.json")
    key.unlink()
    os.mkfifo(key)
    with pytest.raises(AutoparError, match="which cannot be read: it is a pipe"):
        read_cached(tmp_path / "y.json")


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (bytes(31), 0o600, "has 31 bytes, and a key has 32"),
        (bytes(9**5), 0o600, "has more than 4096 bytes"),
        (bytes(32), 0o604, "which everyone can read or write"),
    ],
)
def test_a_weak_key_is_refused(key: Path, content: bytes, mode: int, says: str, tmp_path: Path) -> None:
    key.write_bytes(content)
    key.chmod(mode)
    with pytest.raises(AutoparError, match=says):
        write_cached(TEXT, tmp_path / "x.json")
    key.unlink()
    with pytest.raises(AutoparError, match="which cannot be read: No such file"):
        read_cached(tmp_path / "x.json")
