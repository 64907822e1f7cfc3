"""Forward passes whose head vectors are edited on the way, and the next-token loss they give."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tl_valuealign.adapter import ModelView
from tl_valuealign.errors import ModelError
from tl_valuealign.hooks import hook_state, restore_hooks

Edit = Callable[[Tensor], Tensor]


@contextmanager
def edited(view: ModelView, edits: Mapping[str, Edit]) -> Iterator[None]:
    """Replace the activation at each named hook by what its function makes of it.

    The hooks are gone afterwards, also after an error; users' own hooks run before ours.
    """
    points = {name: view.model.hook_dict[name] for name in edits}
    states = {name: hook_state(point) for name, point in points.items()}
    try:
        for name, point in points.items():
            point.add_hook(_hook(edits[name]))
        yield
    finally:
        for name, point in points.items():
            restore_hooks(point, states[name])


def _hook(edit: Edit) -> Callable[..., Tensor]:
    def replace(activation: Tensor, hook: Any = None) -> Tensor:
        return edit(activation)

    return replace


def next_token_losses(view: ModelView, ids: Tensor, edits: Mapping[str, Edit]) -> Tensor:
    """−log p(next token) in nats, float64 [sequence, position − 1], of right-padded ids.

    Raises ``ModelError`` naming a hook that never fired. Call inside ``view.quiet()``.
    """
    fired: set[str] = set()

    def watched(name: str) -> Edit:
        def edit(activation: Tensor) -> Tensor:
            fired.add(name)
            return edits[name](activation)

        return edit

    options: dict[str, Any] = {"return_type": "logits"}
    if view.is_bridge:
        options |= {"use_cache": False}
    else:
        options |= {"prepend_bos": False, "padding_side": "right"}
    with torch.inference_mode(), edited(view, {name: watched(name) for name in edits}):
        logits = view.model(ids.to(view.input_device), **options)
    missing = [name for name in edits if name not in fired]
    if missing:
        raise ModelError(
            f"{', '.join(missing[:4])} never fired, so nothing was substituted there; this "
            f"architecture does not compute its heads through that hook"
        )
    losses = []
    # One sequence at a time: the logits of a batch in float64 may be gigabytes.
    for row, following in zip(logits, ids.to(logits.device), strict=True):
        scores = torch.log_softmax(row[:-1].float(), dim=-1)
        losses.append(-scores.gather(1, following[1:, None])[:, 0].double().cpu())
    return torch.stack(losses)
