"""Code that numba compiled earlier: what another version of the files left is not used."""

from __future__ import annotations

from langchain_card.runtime.cpu import block_matmul, compiled, row_layers


def test_what_was_compiled_of_other_files_is_not_used() -> None:
    """A kernel in one file is compiled into functions of others: numba alone would keep those."""
    stamp = compiled._stamp()
    assert {"block_matmul.py", "block_kernel.py", "row_kernels.py"} <= {name for name, _, _ in stamp}
    for function in (block_matmul.multiply, block_matmul._stretches, row_layers.decode):
        assert function._cache._cache_file._source_stamp == stamp
