"""What is read stays within bounds, and what is written is whole."""

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from autopar.errors import AutoparError, PlanError
from autopar.ir.files import (
    OTHERS_WRITE,
    check_nesting,
    check_output,
    parse_json,
    read_json,
    read_text,
    save_text,
    write_whole,
)
from autopar.ir.plan_reading import read_document
from autopar.ir.recompute import parse_wish


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '["]]]", ' * 200])
def test_deep_nesting_is_refused_before_it_is_parsed(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ValueError, match="nested more than 100 levels"):
        parse_json(text)
    with pytest.raises(PlanError, match=r"plan.json is damaged: it is nested more than 100 levels"):
        read_document(tmp_path / "plan.json")


def test_brackets_of_strings_do_not_count():
    text = json.dumps(["[" * 500, '\\"[' * 500, {"[{": "]"}])
    assert parse_json(text) == json.loads(text)
    check_nesting('"' + '\\"' * 500_000)  # in one pass, though no string ends


def test_a_deep_selection_of_ops_is_refused():
    with pytest.raises(PlanError, match="nested more than 100 levels"):
        parse_wish('{"a":' + "[" * 100_000)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(number):
    with pytest.raises(ValueError, match=f"{number} is not a finite number"):
        parse_json(f'{{"a": {number}}}')


@pytest.mark.parametrize("number", [10**400, -(10**400)])
def test_whole_numbers_beyond_every_float_are_none(number):
    with pytest.raises(ValueError, match=r"\d+... of 40[12] digits is not a finite number"):
        parse_json(f'{{"a": {number}}}')


@pytest.mark.parametrize("read", [parse_json, lambda text: read_json(_written(text))])
def test_half_of_a_character_is_refused(read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in (r'"\ud800"', r'{"\udfff": 1}', r'["\udc00\ud800"]'):
        with pytest.raises(ValueError, match=r"it has '\\ud[0-9a-f]{3}', which is half of a character"):
            read(text)
    for text in (r'"\ud83d\ude00"', r'"\\ud800"', '"😀"'):  # a whole one, a backslash and letters, and as it is
        assert read(text) == json.loads(text)


def _written(text):
    Path("x.json").write_text(text)
    return "x.json"


def test_a_long_file_is_not_read(tmp_path):
    (tmp_path / "long").write_bytes(bytes(1001))
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_text(tmp_path / "long", most_bytes=1000)


def test_what_could_be_waited_for_is_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is at most 107 characters long
    os.mkfifo("pipe")
    os.symlink("pipe", "link")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("door")
        for path, says in (
            ("pipe", "it is a pipe"),
            ("link", "it is a pipe"),
            ("/dev/zero", "it is a device"),
            (".", "Is a directory"),
            ("door", "No such device or address"),
        ):
            with pytest.raises(PlanError, match=f"Cannot read the plan {path}: {says}"):
                read_document(path)


def test_what_no_file_can_hold_is_one_sentence(tmp_path):
    for text, path in (("\ud800", tmp_path / "x"), ("", Path(f"{tmp_path}/a\0b"))):
        with pytest.raises(AutoparError, match="Cannot write"):
            save_text(text, path)
    assert not os.listdir(tmp_path)


def test_permissions_stay_and_new_files_have_those_of_the_umask(tmp_path):
    secret, new = tmp_path / "secret.json", tmp_path / "new.json"
    secret.write_text("old")
    secret.chmod(0o600)
    before = os.umask(0o027)
    try:
        save_text("a", secret)
        save_text("b", new)
    finally:
        os.umask(before)
    assert [oct(file.stat().st_mode & 0o777) for file in (secret, new)] == ["0o600", "0o640"]
    assert (secret.read_text(), new.read_text()) == ("a", "b")


def test_a_link_stays_and_its_file_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "plan.json").write_text("old")
    (tmp_path / "link.json").symlink_to(tmp_path / "there" / "plan.json")
    save_text("new", tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "there" / "plan.json").read_text() == "new"
    assert os.listdir(tmp_path / "there") == ["plan.json"]


def test_a_link_that_another_user_made_in_a_folder_for_everyone_is_not_followed(tmp_path):
    """As the system refuses it where fs.protected_symlinks says so; a link to nothing is refused, too."""
    if os.geteuid() or Path("/proc/sys/fs/protected_symlinks").read_text().strip() != "1":
        pytest.skip("needs root, which can make a link of another user, and fs.protected_symlinks")
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o1777)
    os.chown(shared, 65533, -1)
    own.write_text("mine")
    for target in (own, tmp_path / "new"):
        (shared / "link").symlink_to(target)
        os.chown(shared / "link", 65534, -1, follow_symlinks=False)
        with pytest.raises(AutoparError, match="Permission denied"):
            save_text("theirs", shared / "link")
        (shared / "link").unlink()
    assert own.read_text() == "mine" and not (tmp_path / "new").exists()


def test_only_regular_files_are_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket is at most 107 characters long
    os.mkfifo("pipe")
    os.mkdir("folder")
    os.symlink("loop", "loop")
    os.symlink("/dev/full", "to_device")
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("door")
        for path, says in (
            ("pipe", "it is a pipe"),
            ("folder", "it is a folder"),
            ("door", "it is a socket"),
            ("to_device", "it is a device"),
            ("/dev/full", "it is a device"),
            ("loop", "Too many levels of symbolic links"),
            ("none/plan.json", "there is no folder none"),
        ):
            for attempt in (lambda p=path: save_text("x", p), lambda p=path: check_output(Path(p))):
                with pytest.raises(AutoparError, match=f"Cannot write {path}: {says}"):
                    attempt()
    assert sorted(os.listdir()) == ["door", "folder", "loop", "pipe", "to_device"]
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_file_that_others_own_or_can_write_is_not_own(tmp_path, monkeypatch):
    path = tmp_path / "own.json"
    write_whole("{}", path, without=OTHERS_WRITE)
    assert read_text(path, only_own=True) == "{}"
    path.chmod(0o664)
    with pytest.raises(ValueError, match="its permissions are 664, so that other users can write it"):
        read_text(path, only_own=True)
    write_whole("{}", path, without=OTHERS_WRITE)
    assert path.stat().st_mode & 0o777 == 0o644
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ValueError, match=r"it belongs to user \d+, but this is user \d+"):
        read_text(path, only_own=True)
