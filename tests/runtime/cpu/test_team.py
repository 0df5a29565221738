"""Threads that share compiled code: every share once, however they meet; a thread that waits gives its core away."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from langchain_card.runtime.cpu.team import cores
from langchain_card.runtime.threads import use_threads
from tests.support.teams import expected, fail, results, slice_often


def test_each_thread_gets_its_share_each_time() -> None:
    for threads in (1, 2, 5, 3):
        assert np.array_equal(results(threads), expected(threads))


def test_threads_do_not_count_the_users_of_their_callers_arrays() -> None:
    """Also in a nested tuple, of arrays that are freed after a call."""
    out, counted = np.zeros(3), np.ones(3, np.int64)
    use_threads(3)
    with cores() as team:
        slice_often(200, out, counted, team)
    assert np.array_equal(out, [199 * (4 - n + 2 * (n + 1)) for n in range(3)])
    assert not counted.any()


def test_several_callers_have_teams_of_their_own() -> None:
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda number: results(1 + number % 3), range(24)):
            assert np.array_equal(found, expected(len(found)))


def test_helpers_that_sleep_are_woken() -> None:
    """Short calls with pauses around the time after which a helper sleeps (0.3 s)."""
    for pause in (0.0, 0.0005, 0.002, 0.01, 0.03) * 5:
        assert np.array_equal(results(2, 1), expected(2, 1))
        time.sleep(pause)


def test_helpers_end_with_their_caller() -> None:
    caller = threading.Thread(target=lambda: results(3))
    before = threading.active_count()
    caller.start()
    caller.join()
    gc.collect()
    deadline = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < deadline, [thread.name for thread in threading.enumerate()]
        time.sleep(0.01)


ON_ONE_CORE = """
import os, time
import numpy
from tests.support.teams import results

results(2)
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
begun = time.process_time()
results(2, 2000)
print(time.process_time() - begun)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="for Linux")
def test_threads_that_wait_give_their_core_to_others() -> None:
    """Two threads on one core; each round would take milliseconds if it had to be taken away from them (3 s)."""
    done = subprocess.run([sys.executable, "-c", ON_ONE_CORE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.0, "2,000 rounds took more than a millisecond of computing each"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_a_share_is_raised_when_all_are_done(failing: int) -> None:
    with pytest.raises(MemoryError, match="no memory"):
        fail(2, failing)
    assert np.array_equal(results(2), expected(2))


def test_a_call_within_a_call_is_refused() -> None:
    use_threads(2)
    with cores(), pytest.raises(AssertionError), cores():
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="for systems that fork")
def test_a_fork_makes_helpers_of_its_own() -> None:
    code = "import os; from tests.support.teams import expected, results; results(2); pid = os.fork()\n"
    code += "ok = bool((results(2) == expected(2)).all())\n"
    code += "os._exit(not ok) if pid == 0 else exit(os.waitpid(pid, 0)[1] or not ok)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
