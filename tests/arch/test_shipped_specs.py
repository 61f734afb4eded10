"""Every shipped spec loads and lowers to a plan."""

from __future__ import annotations

import pytest

from v4graph.plan.lower import lower
from v4graph.plan.types import Limits
from v4graph.spec.load import load_spec, shipped_specs


@pytest.mark.parametrize("name", shipped_specs())
def test_loads_and_lowers(name: str) -> None:
    spec = load_spec(name)
    assert spec.name == name
    assert lower(spec, Limits(max_num_seqs=1, max_model_len=1024)).groups
