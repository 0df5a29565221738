"""Code that numba compiled earlier: what another version of the files left is not used."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType

import pytest
from numba.core.caching import IndexDataCacheFile

from langchain_card.runtime.cpu import compilations, compiled, row_layers
from langchain_card.runtime.cpu.blocks import matmul


def test_what_was_compiled_of_other_files_is_not_used() -> None:
    """A kernel in one file is compiled into functions of others: numba alone would keep those."""
    stamp = compiled._stamp()
    assert {"matmul.py", "kernel.py", "row_kernels.py"} <= {name for name, _, _ in stamp}
    for function in (matmul.multiply, matmul._stretch, row_layers.decode):
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


def test_a_function_counts_as_compiled_unless_a_cache_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubling.py").write_text("def double(number):\n    return 2 * number\n")
    monkeypatch.syspath_prepend(tmp_path)
    from doubling import double  # type: ignore[import-not-found]

    before, calls = compilations.num_begun(), list[int]()
    with compilations.watched(lambda: calls.append(compilations.num_begun() - before)):
        doubling = compiled.compiled()(double)
        assert not calls, "none before the first call"
        assert doubling(2) == 4 and doubling(2.0) == 4.0 and calls == [1, 2], "one for each type"
        assert compiled.compiled()(double)(3) == 6 and compilations.num_begun() == before + 2
    doubling(2j)
    assert calls == [1, 2], "no longer watched"
