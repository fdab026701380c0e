"""Two drivers that share a study in PostgreSQL, of which one is killed, stopped or suspended."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import optuna
import psutil
import pytest
from conftest import long
from launching import Started, free_port, wait_for
from test_studies import QUICK, compare, rows, study_file

from gpt2_accel.study.engine import open_storage

UPDATES = 500


def programs():
    """Returns the folder of PostgreSQL's programs, None if it is not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return found[-1].parent if found else None


@pytest.fixture(scope="module")
def database():
    """The URL of a PostgreSQL server, which does not run as root."""
    if programs() is None:
        pytest.skip("PostgreSQL is not installed")
    folder, port, as_user = Path(tempfile.mkdtemp(prefix="postgres-")), free_port(), {}
    if os.getuid() == 0:
        as_user = {"user": pwd.getpwnam("postgres").pw_uid, "extra_groups": []}
        os.chown(folder, as_user["user"], -1)

    def call(name, *flags):
        command = [programs() / name, "-D", folder / "db", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", **as_user)

    call("initdb", "-A", "trust", "-U", "study")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories={folder}"
    call("pg_ctl", "-o", options, "-l", folder / "log", "-w", "start")
    yield f"postgresql://study@127.0.0.1:{port}/postgres"
    call("pg_ctl", "-m", "immediate", "stop")
    shutil.rmtree(folder)


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
    """The table of one driver."""
    folder = tmp_path_factory.mktemp("alone")
    done = compare(study(folder, data_dir), folder / "out")
    assert done.returncode == 0, done.stderr
    return (folder / "out/runs.csv").read_bytes()


@long
@pytest.mark.parametrize(
    "how", ["together", "kill", "kill at the last", "ctrl-c", "suspend", "freeze"]
)
def test_two_drivers(how, database, alone, data_dir, tmp_path):
    path, out = study(tmp_path, data_dir), tmp_path / how.replace(" ", "_")
    command = (QUICK, path, "--output_dir", out, "--storage", database, "--processes", 1)
    both = [Started(*command, log=tmp_path / f"log{n}") for n in range(2)]
    drivers = [psutil.Process(started.pids[0]) for started in both]

    def victim():
        """A driver whose trainer is in the middle of a run, at last of the last run."""
        done = len(rows(out)) if (out / "runs.csv").exists() else 0
        for number, driver in enumerate(drivers):
            if done < 2 and how == "kill at the last":
                continue
            for trainer in driver.children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    locked = [Path(f.path) for f in trainer.open_files() if ".lock" in f.path]
                    if any(list(lock.parent.glob("checkpoint-*")) for lock in locked):
                        return number, trainer
        return None

    if how == "together":
        assert [started.wait() for started in both] == [0, 0], (tmp_path / "log0").read_text()
    else:
        wait_for(victim, 120)
        number, trainer = victim()
        hit, other = drivers[number], both[1 - number]
        if how == "ctrl-c":
            hit.send_signal(signal.SIGINT)
            assert both[number].wait() == 130
        elif how.startswith("kill"):
            hit.kill()
        else:
            hit.suspend()
            if how == "freeze":
                trainer.suspend()
                time.sleep(15)
                trainer.resume()
                hit.resume()
        assert other.wait() == 0, (tmp_path / f"log{1 - number}").read_text()
        if how == "suspend":
            hit.resume()
        if how in ("suspend", "freeze"):
            assert both[number].wait() == 0, (tmp_path / f"log{number}").read_text()
    assert (out / "runs.csv").read_bytes() == alone
    found = optuna.load_study(study_name=f"{out.name}: runs", storage=open_storage(database)).trials
    ended = [t.user_attrs["run"] for t in found if t.state.name == "COMPLETE"]
    assert sorted(ended) == sorted(row["id"] for row in rows(out))  # each once
    starts = [log.read_text().count("updates 0 to") for log in out.glob("runs/*/log.txt")]
    assert starts == [1] * 3  # none from the beginning again
