"""Row-exact int8: integer sums are exact, and a row does not depend on its neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from langchain_card.runtime.cpu.integer_layers import IntegerLinear

from langchain_card.runtime.cpu import compiled, matmul_kernel, row_layers
from langchain_card.runtime.cpu import integer_matmul as products
from langchain_card.runtime.cpu.int8 import ACTIVATION_LEVELS, quantize_rows, rotate

pytestmark = pytest.mark.skipif(matmul_kernel.instructions() is None, reason="this CPU lacks AVX2")


def reference(layer_weight: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The same arithmetic with exact integers."""
    x = rotate(x)
    row_scale = x.abs().amax(dim=-1, keepdim=True)
    levels = torch.round(x / row_scale * ACTIVATION_LEVELS).long()
    sums = levels @ layer_weight.long().T
    return sums.double() * scale.double() / ACTIVATION_LEVELS * row_scale.double()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("features", [2, 64, 1536, 8960])
def test_worst_case_sums_are_exact(features: int, sign: int) -> None:
    """All products at their largest with one sign: where 8 x 8 bits saturate in 16-bit pairs."""
    weight = torch.full((32, features), sign * 127, dtype=torch.int8)
    scale = torch.full((32,), 0.01)
    for value in (1.0, -1.0):
        x = rotate(torch.full((3, features), value))  # the layer rotates it back
        got = IntegerLinear(weight, scale)(x)
        torch.testing.assert_close(got.double(), reference(weight, scale, x), rtol=1e-6, atol=0)


def test_random_sums_are_exact() -> None:
    torch.manual_seed(0)
    weight, scale = quantize_rows(torch.randn(257, 1000))
    x = torch.randn(9, 1000) * torch.logspace(-6, 6, 9)[:, None]
    got = IntegerLinear(weight, scale)(x)
    torch.testing.assert_close(got.double(), reference(weight, scale, x), rtol=1e-5, atol=1e-9)


def test_more_activation_bits_would_saturate() -> None:
    """The reason for 7 bits, where the processor lacks VNNI: 8-bit activations give silently wrong sums."""
    assert 2 * (2 * ACTIVATION_LEVELS + 1) * 128 <= 2**15 - 1


DIGEST = """
import hashlib, sys
import numpy as np, torch
from langchain_card.runtime.cpu import int4, matmul_kernel
from langchain_card.runtime.cpu.integer_layers import IntegerLinear
from langchain_card.runtime.cpu.int8 import quantize_rows

torch.manual_seed(4)
found = hashlib.sha256()
for shape in ((32, 64), (151, 30), (300, 576), (576, 1536), (96, 256)):
    layer, x = IntegerLinear(*quantize_rows(torch.randn(*shape))), torch.randn(11, shape[1])
    found.update(layer(x).numpy().tobytes())
    int4.to_4_bits(layer)
    found.update(layer(x).numpy().tobytes())
print(found.hexdigest())
"""
OLDER = {  # what is said first, and what numba is to take this CPU for
    "avx2": ("", {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+avx,+sse4.2,+bmi,+bmi2"}),
    "avxvnni": ("from langchain_card.runtime.cpu import matmul_kernel as k; k.instructions = lambda: 'avxvnni'", {}),
}


@pytest.mark.parametrize("older", OLDER)
@pytest.mark.slow
def test_older_instructions_give_the_same_bits(older: str, tmp_path: Path) -> None:
    """Each in a process of its own, which compiles for it."""
    if older == "avxvnni" and matmul_kernel.instructions() != "avx512vnni":
        pytest.skip("this CPU has not the instruction")

    def digest(before: str, env: dict[str, str]) -> str:
        code = [sys.executable, "-c", before + DIGEST]
        done = subprocess.run(code, env=os.environ | env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    before, env = OLDER[older]
    assert digest(before, env | {"NUMBA_CACHE_DIR": str(tmp_path)}) == digest("", {})


def test_what_was_compiled_of_other_files_is_not_used() -> None:
    """A kernel in one file is compiled into functions of others: numba alone would keep those."""
    stamp = compiled._stamp()
    assert {"integer_matmul.py", "matmul_kernel.py", "row_kernels.py"} <= {name for name, _, _ in stamp}
    for function in (products.multiply, products._stretches, row_layers.decode):
        assert function._cache._cache_file._source_stamp == stamp


@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("features", [1, 2, 3, 4, 127, 128, 129])
def test_any_size_is_packed_and_unpacked(outputs: int, features: int) -> None:
    weight, scale = (part.numpy() for part in quantize_rows(torch.randn(outputs, features)))
    packed = products.pack(weight, scale[:, None], ACTIVATION_LEVELS)
    own, scales = packed.unpack()
    assert (own == weight).all() and abs(scales[:, 0] / scale - 1).max() < 1e-6
    x = torch.randn(3, features)
    layer = IntegerLinear(torch.from_numpy(weight), torch.from_numpy(scale))
    wanted = reference(torch.from_numpy(weight), torch.from_numpy(scale), x)
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(151, 64), (300, 576), (300, 896), (300, 4864), (576, 1536), (1536, 8960)])
def test_a_row_has_the_same_bits_beside_any_other_rows(shape: tuple[int, int], threads: int) -> None:
    torch.manual_seed(1)
    weight, scale = quantize_rows(torch.randn(*shape))
    layer = IntegerLinear(weight, scale, torch.randn(shape[0]))
    x = torch.randn(16, shape[1]) * torch.logspace(-3, 3, 16)[:, None]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = torch.cat([layer(x[i : i + 1]) for i in range(16)])
        torch.set_num_threads(threads)
        for count in (2, 4, 7, 16):
            assert torch.equal(layer(x[:count]), alone[:count])
        assert torch.equal(layer(x.flip(0)).flip(0), alone)
    finally:
        torch.set_num_threads(before)


def test_rotation_keeps_the_product_and_is_its_own_inverse() -> None:
    torch.manual_seed(2)
    weight, x = torch.randn(7, 192), torch.randn(5, 192)
    torch.testing.assert_close(rotate(x) @ rotate(weight).T, x @ weight.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rotate(rotate(x)), x, rtol=1e-5, atol=1e-5)
    odd = torch.randn(2, 100)
    assert rotate(odd) is odd


def test_one_huge_feature_does_not_drown_the_others() -> None:
    """What made SmolLM2 lose a sixth of its choices: with a feature 100 times the others, these had one level left."""
    torch.manual_seed(3)
    weight, x = torch.randn(256, 1536), torch.randn(8, 1536)
    x[:, 77] *= 100
    got, wanted = IntegerLinear(*quantize_rows(weight))(x), x @ weight.T
    rest = wanted - x[:, 77:78] * weight[:, 77]
    assert (got - wanted).norm() < 0.25 * rest.norm()


def test_zero_rows_stay_finite() -> None:
    weight, scale = quantize_rows(torch.zeros(8, 16))
    assert torch.equal(IntegerLinear(weight, scale)(torch.zeros(2, 16)), torch.zeros(2, 8))
