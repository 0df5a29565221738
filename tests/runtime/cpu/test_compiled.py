"""Code that numba compiled earlier, of which other versions' is not used; threads that wait for others."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from numba.core.caching import IndexDataCacheFile

from langchain_card.runtime.cpu import compiled, row_layers
from langchain_card.runtime.cpu.blocks import matmul


def test_what_was_compiled_of_other_files_is_not_used() -> None:
    """A kernel in one file is compiled into functions of others: numba alone would keep those."""
    stamp = compiled._stamp()
    assert {"matmul.py", "kernel.py", "row_kernels.py"} <= {name for name, _, _ in stamp}
    for function in (matmul.multiply, matmul._stretches, row_layers.decode):
        assert function._cache._cache_file._source_stamp == stamp


@pytest.mark.parametrize("gone", ["module", "class"])
def test_an_index_may_name_classes_that_are_gone(gone: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("earlier_version")
    module.Weights = type("Weights", (), {"__module__": "earlier_version"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "earlier_version", module)
    file = IndexDataCacheFile(str(tmp_path), "function", ("stamp",))
    Path(file._index_path).write_bytes(
        pickle.dumps(file._version) + pickle.dumps((("stamp",), {module.Weights: "function.1.nbc"}))
    )
    compiled._stamp_cache(file)
    if gone == "module":
        monkeypatch.delitem(sys.modules, "earlier_version")
    else:
        del module.Weights
    assert file._load_index() == {}


ON_ONE_CORE = """
import os, resource
import numpy, torch
from langchain_card.runtime.cpu import compiled

def work():
    with compiled.cores():
        compiled.compiled(parallel=True)(compiled._touch)(places)

torch.set_num_threads(2)
places = numpy.zeros(2, numpy.int32)
work()
for thread in os.listdir("/proc/self/task"):
    os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
for _ in range(50):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="for two cores")
def test_threads_that_wait_give_their_core_to_others() -> None:
    """Two threads on one core, where each can only end when the other sleeps or its time is over (3 s)."""
    done = subprocess.run([sys.executable, "-c", ON_ONE_CORE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 50, "a thread gave its core away only when its time was over"
