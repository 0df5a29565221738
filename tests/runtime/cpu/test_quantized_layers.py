"""Layers in blocks with adapters: a row has the same bits whatever rows are beside it."""

from __future__ import annotations

import pytest
import torch

from langchain_card.runtime.cpu.quantized_layers import RowWiseLinear


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_a_rows_product_with_its_adapter_depends_on_no_other_row(rows: int) -> None:
    """Torch's own product of one or two rows has other bits than that of more."""
    torch.manual_seed(0)
    x, a, b = torch.randn(40, 1000), torch.randn(24, 1000), torch.randn(300, 24)
    others = torch.randint(2, (40, 24)).bool()
    layer = RowWiseLinear()
    whole = layer.low_rank_product(x, a, others, b)
    assert torch.equal(layer.low_rank_product(x[:rows], a, others[:rows], b), whole[:rows])
    wanted = (x.double() @ a.double().T).masked_fill(others, 0) @ b.double().T
    assert torch.allclose(whole.double(), wanted, rtol=1e-3, atol=1e-3)
