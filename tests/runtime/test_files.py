"""Atomic writes and locks, with concurrent writers, on full disks and without links."""

import errno
import fcntl
import io
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import refused, run
from safetensors.torch import save_file

from gpt2_accel.runtime.files import (
    JsonLines,
    atomic_directory,
    atomic_files,
    lock_folder,
    lock_id,
    read_json_lines,
    remove_leftovers,
    scratch_path,
    sentence,
    write_file,
)


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
    assert set(tmp_path.iterdir()) == {mine, elsewhere}


def test_a_failed_replacement_of_a_folder_puts_the_old_one_back(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint-4"
    rename = Path.rename
    with atomic_directory(path) as folder:
        (folder / "a.txt").write_text("old")

    def no_space(self, target):
        if (self / "a.txt").read_text() == "new":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", no_space)
    with refused("No space"), atomic_directory(path, replace=True) as folder:
        (folder / "a.txt").write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-4"]
    assert (path / "a.txt").read_text() == "old"


def test_everything_is_synced_to_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    synced = {}
    named = []

    def noted(file):
        synced[os.fstat(file).st_ino] = os.fstat(file).st_size

    def checked(rename):
        def run(source, target):
            for path in (Path(source), *Path(source).rglob("*")):
                info = path.stat()
                assert path.is_dir() or synced[info.st_ino] == info.st_size == 3
                assert info.st_ino in synced
            named.append(Path(target).name)
            synced.pop(tmp_path.stat().st_ino, None)
            return rename(source, target)

        return run

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(os, "rename", checked(os.rename))
    monkeypatch.setattr(os, "replace", checked(os.replace))
    write_file(tmp_path / "a.txt", "new")
    with atomic_directory(tmp_path / "checkpoint-4") as folder:
        (folder / "state").mkdir()
        (folder / "state/a.txt").write_text("new")
    assert tmp_path.stat().st_ino in synced  # the name too
    with atomic_files(tmp_path) as folder:
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text("new")
    assert named == ["a.txt", "checkpoint-4", "model.safetensors", "config.json"]
    assert tmp_path.stat().st_ino in synced


@pytest.mark.parametrize("write", [lambda path, tensors: save_file(tensors, path), write_file])
def test_an_error_of_the_disk_is_an_oserror_that_names_its_file(write, small_disk):
    path = small_disk(1) / "new"
    content = bytes(2**21) if write is write_file else {"a": torch.zeros(2**19)}
    for context in (atomic_directory, atomic_files):
        with pytest.raises(OSError) as raised, context(path) as folder:
            write(folder / "w", content)
        message = sentence(raised.value)
        assert message.startswith(str(path))
        assert os.strerror(errno.ENOSPC) in message
        with pytest.raises(AttributeError, match="a bug"), context(path):
            raise AttributeError("a bug")


def test_a_log_keeps_its_lines_while_the_disk_is_full_and_names_the_file_if_it_stays_full(
    tmp_path, capsys
):
    class Disk(io.FileIO):
        full = False

        def write(self, content):
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content[:7])  # a part, as on a disk that is nearly full

    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path, 0)
    disk = Disk(path, "ab")
    log._file = io.BufferedWriter(disk, 2**20)
    for step, full in enumerate((False, True, True, False, True, True)):
        disk.full = full
        log.write({"step": step})
        if not disk.full:
            assert [line["step"] for line in read_json_lines(path)] == list(range(step + 1))
    log.close()
    message = capsys.readouterr().err
    assert message == f"{path} lacks its last lines: No space left on device\n"
    assert len(read_json_lines(path)) == 4


@pytest.mark.parametrize("lockd", [True, False])
def test_a_lock_has_another_id_in_a_new_folder_and_a_waiter_gets_it_when_it_ends(
    lockd, tmp_path, monkeypatch
):
    if not lockd:
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    folder = tmp_path / "new/run"
    with lock_folder(folder):
        first = lock_id(folder)
        with refused("in use by another process"), lock_folder(folder):
            raise AssertionError("not reached")
        folder.rename(tmp_path / "moved")
        with lock_folder(folder):
            assert lock_id(folder) not in (0, first)
        held = threading.Event()
        holder = threading.Thread(target=hold, args=(folder, held))
        holder.start()
        held.wait()
        with lock_folder(folder, wait=30):
            holder.join()


WITHOUT_FLOCK = """
import errno, fcntl, sys, time
from gpt2_accel.runtime.files import lock_folder
def flock(*_): raise OSError(errno.ENOSYS, "Function not implemented")
fcntl.flock = flock
with lock_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def test_without_flock_a_lock_that_a_kill_left_is_taken_over_on_its_host_only(tmp_path):
    def start(seconds):
        command = [sys.executable, "-c", WITHOUT_FLOCK, tmp_path / "run", str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    first = start(60)
    assert first.stdout.readline() == "held\n"
    lock = tmp_path / "run/.lock"
    record = lock.read_text()
    assert "is in use by another process" in start(0).communicate()[1]
    first.kill()
    first.communicate()
    lock.write_text(record.replace(socket.gethostname(), "elsewhere"))
    assert f"host in {lock} are gone, delete that file" in start(0).communicate()[1]
    lock.write_text(record)
    assert start(0).communicate()[0] == "held\n"


def hold(folder, held):
    with lock_folder(folder):
        held.set()
        time.sleep(1)


def test_the_umask_decides_the_mode_of_all_files_of_a_run(tiny, tmp_path):
    before = os.umask(0o027)
    try:
        run(tiny("run", max_steps=1))
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*.*") if path.is_file() and path.name != ".lock"]
    assert {path.name: path.stat().st_mode & 0o777 for path in files} == {
        path.name: 0o640 for path in files
    }
    assert {"model.safetensors", "optimizer.safetensors"} <= {path.name for path in files}
