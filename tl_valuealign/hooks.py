"""The hooks of a TransformerLens hook point, noted and put back."""

from typing import Any


def hook_state(point: Any) -> list[Any]:
    """Copies of TransformerLens's handle lists and of the torch hook tables behind them."""
    return [
        list(point.fwd_hooks),
        list(point.bwd_hooks),
        dict(point._forward_hooks),
        dict(point._backward_hooks),
    ]


def restore_hooks(point: Any, state: list[Any]) -> None:
    """Some releases drop a user's hooks in run_with_cache; an exception may leave ours behind."""
    if hook_state(point) == state:
        return
    point.fwd_hooks[:], point.bwd_hooks[:] = state[:2]
    for table, kept in zip((point._forward_hooks, point._backward_hooks), state[2:], strict=True):
        table.clear()
        table.update(kept)
