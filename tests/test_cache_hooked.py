"""The cache of a HookedTransformer in place of forward passes."""

import pytest
import zoo
from test_cache import OPTIONS, assert_same, streams_of

import tl_valuealign as va

pytestmark = pytest.mark.hooked


@pytest.mark.parametrize("processed", [False, True], ids=["raw", "processed"])
@pytest.mark.parametrize("name", ["LN", "grouped_rotary", "parallel"])
def test_the_cache_of_a_hooked_transformer(name, processed):
    model, ids = zoo.hooked(name, processed=processed), zoo.ids(batch=9)
    run = va.analyze_value_alignment(model, ids, **OPTIONS)
    assert_same(
        va.analyze_value_alignment(model, ids, cache=streams_of(model, ids), **OPTIONS), run
    )
    with pytest.raises(va.SelfCheckError, match="of sequence 0"):
        other = streams_of(model, ids.flip(1))
        va.analyze_value_alignment(model, ids, cache=other, **OPTIONS)
