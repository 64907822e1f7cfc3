"""Every typed boundary refuses a wrong shape and a wrong dtype."""

from dataclasses import fields, replace

import pytest
import torch
from fakes import fake_result
from typeguard import TypeCheckError

from tl_valuealign.chance import chance_alignment
from tl_valuealign.role_result import Checks, RoleResult, Spectra
from tl_valuealign.shapes import check_fields, typed
from tl_valuealign.spectra import (
    HeadSVD,
    count_directions,
    decompose,
    decompose_product,
    numerical_rank,
    tied_at,
)
from tl_valuealign.sums import RoleSums, Sums
from tl_valuealign.tokens import Batch

RESULT = fake_result()
VALUES = {
    RoleResult: RESULT.V,
    RoleSums: RESULT.sums.roles["V"],
    Sums: RESULT.sums,
    Checks: RESULT.checks,
    Spectra: Spectra.of(RESULT.V),
    HeadSVD: HeadSVD(torch.zeros(2, 6, 3), torch.zeros(2, 3)),
    Batch: Batch(torch.zeros(2, 5, dtype=torch.int64), torch.ones(2, 5).bool(), (1, 2)),
    type(RESULT): RESULT,
}
FIELDS = [
    (kind, field.name)
    for kind, value in VALUES.items()
    for field in fields(kind)
    if isinstance(getattr(value, field.name), torch.Tensor)
]


def spoil(tensor, how):
    if how == "shape":
        return torch.stack([tensor, tensor])
    return tensor.to(torch.complex64)


@pytest.mark.parametrize("how", ["shape", "dtype"])
@pytest.mark.parametrize(
    ("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value)
)
def test_every_tensor_field_is_checked(kind, name, how):
    value = VALUES[kind]
    with pytest.raises(TypeCheckError, match=name):
        replace(value, **{name: spoil(getattr(value, name), how)})


def test_axes_of_one_result_must_agree():
    one_head_short = RESULT.V.chance[..., :-1]
    with pytest.raises(TypeCheckError, match="chance"):
        replace(RESULT.V, chance=one_head_short)


STACK = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
CALLS = {
    "decompose shape": lambda: decompose(STACK[0], torch.float32),
    "decompose dtype": lambda: decompose(STACK.to(torch.int64), torch.float32),
    "decompose_product shape": lambda: decompose_product(STACK[0], STACK.mT),
    "decompose_product dtype": lambda: decompose_product(STACK.to(torch.int64), STACK.mT),
    "count_directions shape": lambda: count_directions(STACK, 0.9),
    "count_directions dtype": lambda: count_directions(STACK[0].to(torch.int64), 0.9),
    "numerical_rank shape": lambda: numerical_rank(STACK, 6, torch.float32),
    "numerical_rank dtype": lambda: numerical_rank(STACK[0].bool(), 6, torch.float32),
    "tied_at shape": lambda: tied_at(STACK, torch.tensor([1]), torch.float32),
    "chance shape": lambda: chance_alignment(torch.ones(2, 3, dtype=torch.int64), 6, "norm"),
    "chance dtype": lambda: chance_alignment(torch.ones(1, 2, 3), 6, "norm"),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_typed_function_is_checked(name):
    with pytest.raises(TypeCheckError):
        CALLS[name]()


def test_the_decorator_checks_results_too():
    @typed
    def wrong(x: HeadSVD) -> HeadSVD:
        return x.directions

    with pytest.raises(TypeCheckError):
        wrong(VALUES[HeadSVD])


def test_a_right_value_passes():
    for value in VALUES.values():
        check_fields(value)
