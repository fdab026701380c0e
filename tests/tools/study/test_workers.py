"""Several drivers that share the folder of a study, of which one is killed, stopped or suspended."""

import os
import signal
import threading
import time
from datetime import UTC, datetime

import psutil
import pytest
from conftest import long
from filelock import FileLock
from launching import Started, wait_for
from test_studies import COMPARE, compare, rows, study_file

from gpt2_accel.runtime.files import write_json
from gpt2_accel.tools.study.engine import LOG, failure

UPDATES = 250


def study(folder, data_dir):
    """A study of three runs, so that one is the last."""
    variants = {
        name: {"learning_rate": rate} for name, rate in zip("abc", (1e-2, 5e-3, 2e-3), strict=True)
    }
    settings, budget = {"save_every": 50}, {"tokens": UPDATES * 128}
    parts = {"variants": variants, "settings": settings, "budget": budget, "seeds": 1}
    return study_file(folder, data_dir, **parts)


@pytest.fixture(scope="module")
def alone(data_dir, tmp_path_factory):
    """The folder of one driver."""
    folder = tmp_path_factory.mktemp("alone")
    compare(study(folder, data_dir), folder / "out")
    return folder / "out"


def check(out, alone):
    """The table is that of one driver, and no run began twice."""
    assert (out / "runs.csv").read_bytes() == (alone / "runs.csv").read_bytes()
    starts = [log.read_text().count("updates 0 to") for log in out.glob(f"runs/*/{LOG}")]
    assert starts == [1] * 3


def in_middle(driver, out):
    """Whether a driver trains a run that has a checkpoint."""
    ids = [os.path.basename(file.path)[1:-5] for file in driver.open_files()]
    return any(list(out.glob(f"runs/*-{id}/checkpoint-*")) for id in ids)


def recorded(out):
    """The number of rows in the table."""
    return len(rows(out)) if (out / "runs.csv").exists() else 0


def test_the_folder_has_the_results_of_a_driver_that_could_not_record_them(alone, data_dir):
    table = alone / "runs.csv"
    before = table.read_bytes()
    table.unlink()
    path = study(alone.parent, data_dir)
    compare(path, alone)
    assert table.read_bytes() == before
    check(alone, alone)


@long
def test_a_run_that_another_driver_has_is_left_to_it(alone, data_dir, tmp_path):
    out, last = tmp_path / "out", rows(alone)[0]["id"]
    (out / "runs").mkdir(parents=True)
    lock, seen = FileLock(out / f"runs/.{last}.lock", thread_local=False), []
    lock.acquire()

    def release():
        wait_for(lambda: recorded(out) == 2)
        time.sleep(1)
        seen.extend(out.glob(f"runs/*-{last}"))
        lock.release()

    thread = threading.Thread(target=release)
    thread.start()
    compare(study(tmp_path, data_dir), out)
    thread.join()
    assert not seen
    check(out, alone)


@long
def test_a_driver_goes_on_with_the_run_of_one_that_was_killed(alone, data_dir, tmp_path):
    path, out = study(tmp_path, data_dir), tmp_path / "out"
    started = Started(COMPARE, path, "--output_dir", out, "--processes", 1, log=tmp_path / "log")
    driver = psutil.Process(started.pids[0])

    def kill():
        wait_for(lambda: in_middle(driver, out))
        driver.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    wait_for(lambda: list(out.glob("runs/*/checkpoint-*")))
    compare(path, out)
    thread.join()
    assert started.wait() == -signal.SIGKILL
    check(out, alone)


@long
@pytest.mark.parametrize("how", ["together", "ctrl-c", "suspend"])
def test_two_drivers(how, alone, data_dir, tmp_path):
    path, out = study(tmp_path, data_dir), tmp_path / "out"
    command = (COMPARE, path, "--output_dir", out, "--processes", 1)
    both = [Started(*command, log=tmp_path / f"log{n}") for n in range(2)]
    drivers = [psutil.Process(started.pids[0]) for started in both]
    codes = [0, 0]
    if how != "together":
        wait_for(lambda: any(in_middle(driver, out) for driver in drivers), 120)
        hit = next(n for n, driver in enumerate(drivers) if in_middle(driver, out))
        if how == "ctrl-c":
            both[hit].send_signal(signal.SIGINT)
            codes[hit] = 130
        else:
            drivers[hit].suspend()
            time.sleep(10)
            drivers[hit].resume()
    assert [started.wait() for started in both] == codes, (tmp_path / "log0").read_text()
    check(out, alone)


@pytest.mark.parametrize(
    "code, state, last, words",
    [
        (0, "stopped", "saved", ""),
        (1, "running", "train: runs/a is in use by another process: wait for it to end", ""),
        (1, "stopped", "train: no space left", "train: no space left"),
        (-9, "running", "updates 0 to 20", "killed by SIGKILL"),
        (1, "running", "---", "exit code 1"),
    ],
)
def test_what_a_run_failed_of(code, state, last, words, tmp_path):
    now = datetime.now(UTC).isoformat()
    write_json(tmp_path / "status.json", {"state": state, "time": now})
    (tmp_path / LOG).write_text(f"--\n{last}\n")
    assert failure(tmp_path, code) == words
