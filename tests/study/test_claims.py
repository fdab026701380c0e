"""Claims of runs by several processes."""

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from gpt2_accel.study import claims
from gpt2_accel.study.claims import claim, holder

HERE = socket.gethostname()


def test_one_of_several_processes_gets_a_run(tmp_path):
    code = "import sys; from pathlib import Path; from gpt2_accel.study.claims import claim; sys.stdin.readline(); print(claim(Path(sys.argv[1])) is not None, flush=True); sys.stdin.readline()"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]

    def begin(process):
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(begin, started))
    assert sorted(answers) == ["False"] * 3 + ["True"]
    assert claim(tmp_path) is None
    for process in started:
        process.communicate("\n")
    # Their processes are gone.
    own = claim(tmp_path)
    assert own.path.name == "claim-2" and holder(tmp_path) == f"process {os.getpid()} on {HERE}"
    assert not list(tmp_path.glob(".claim-*"))


def test_a_silent_holder_on_another_machine_is_superseded(tmp_path):
    first = claim(tmp_path)
    first.path.write_text("process 1 on elsewhere")
    assert claim(tmp_path) is None and not first.superseded()
    long_ago = time.time() - claims.SILENCE - 1
    os.utime(first.path, (long_ago, long_ago))
    second = claim(tmp_path)
    assert second.path.name == "claim-2" and first.superseded() and not second.superseded()
    second.path.write_text("process 1 on elsewhere")
    os.utime(second.path, (long_ago, long_ago))
    second.renew()
    assert claim(tmp_path) is None
    second.release()
    assert claim(tmp_path).path.name == "claim-3"
