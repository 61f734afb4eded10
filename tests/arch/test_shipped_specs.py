"""Every shipped spec loads; those whose rows this version can store lower to a plan."""

from __future__ import annotations

import pytest

from v4graph.errors import PlanError
from v4graph.plan.lower import lower
from v4graph.plan.types import Limits
from v4graph.spec.load import load_spec, shipped_specs

# Row formats that no kernel of this version writes.
_NOT_RUNNABLE = {"fp8", "fp8_ds"}


@pytest.mark.parametrize("name", shipped_specs())
def test_loads_and_lowers(name: str) -> None:
    spec = load_spec(name)
    assert spec.name == name
    formats = {g.row.format for g in spec.cache_groups.values() if g.kind != "compressor_state"}
    limits = Limits(max_num_seqs=1, max_model_len=1024)
    if formats & _NOT_RUNNABLE:
        with pytest.raises(PlanError, match="row format"):
            lower(spec, limits)
    else:
        assert lower(spec, limits).groups
