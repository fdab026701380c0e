"""Atomic writes and locks: with concurrent writers, and on file systems without locks or links."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from gpt2_accel.checkpoint.find import point_to
from gpt2_accel.files import (
    check_unused,
    lock_folder,
    parse_json,
    remove_leftovers,
    scratch_path,
    write_file,
    write_json,
)

WRITE = """
import sys
from gpt2_accel.files import write_json
for number in range(300):
    write_json(sys.argv[1], [number] * 100)
"""


def test_concurrent_writers_never_leave_a_partial_file(tmp_path):
    path = tmp_path / "status.json"
    command = [sys.executable, "-c", WRITE, str(path)]
    writers = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            assert len(set(json.loads(path.read_text()))) == 1
        time.sleep(0.005)
    assert [writer.communicate()[1] for writer in writers] == ["", ""]
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_only_leftovers_of_ended_processes_are_removed(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine = scratch_path(tmp_path / "a.json")
    theirs = tmp_path / mine.name.replace(f".{os.getpid()}.", f".{ended.pid}.")
    elsewhere = tmp_path / theirs.name.replace(socket.gethostname(), "elsewhere")
    for path in (mine, elsewhere):
        path.touch()
    theirs.mkdir()
    remove_leftovers(tmp_path)
    assert {*tmp_path.iterdir()} == {mine, elsewhere}


def test_an_output_folder_must_be_new_or_empty(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    check_unused(tmp_path / "new")
    mine = scratch_path(tmp_path / "files")
    (tmp_path / mine.name.replace(f".{os.getpid()}.", f".{ended.pid}.")).mkdir()
    check_unused(tmp_path)  # a killed process left it
    assert not any(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    for used in (tmp_path, file):
        with pytest.raises(FileExistsError, match=f"{used} exists already"):
            check_unused(used)
    with pytest.raises(ValueError, match="output_dir is ''"):
        check_unused("")


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    write_file(tmp_path / "a.txt", "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        write_file(tmp_path / "a.txt", "new")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"]


def test_without_file_locks_a_running_holder_on_this_host_is_refused(tmp_path, monkeypatch, capsys):
    def no_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    holder = f"process {os.getppid()} on {socket.gethostname()}"
    write_file(tmp_path / ".lock", holder)
    with pytest.raises(OSError, match=f"in use by {holder}"), lock_folder(tmp_path):
        raise AssertionError("not reached")
    assert (tmp_path / ".lock").read_text() == holder
    write_file(tmp_path / ".lock", "process 1 on another-machine")
    with lock_folder(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()
    assert "has no file locks" in capsys.readouterr().err


def test_missing_links_are_no_error(tmp_path, monkeypatch):
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "latest").mkdir()  # in a copied run
    with pytest.raises(IsADirectoryError):
        point_to(tmp_path / "latest", tmp_path / "checkpoint-4")
    assert (tmp_path / "latest").is_dir() and not (tmp_path / "latest").is_symlink()

    def refused(*_, **__):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refused)
    point_to(tmp_path / "best", tmp_path / "checkpoint-4")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-4", "latest"]
    write_json(tmp_path / "a.json", 1)


def test_json_nested_too_deeply_is_a_value_error():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
