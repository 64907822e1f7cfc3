"""Every run proves its own inputs: do the streams add up, do the matrices make q, k and v?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tl_valuealign.adapter import HEAD_HOOKS, ModelView
from tl_valuealign.errors import ModelError, SelfCheckError
from tl_valuealign.norms import InputNorm
from tl_valuealign.role_result import Checks

# Relative errors a correct model stays under, with room: measured are 1e-6 in float32, 1e-7 in
# float64 (norms are computed in float32 all the same), and a few roundings of the stored dtype
# (bfloat16 2^-8, float16 2^-11) where the model itself computes in it.
TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}
PROBE_TOKENS = 64
ROUNDINGS = 10.0
# Candidates this close to the best explain the heads equally well (a LayerNorm and an RMSNorm on
# centred weights): the first by the model's own attributes is taken.
TIE = 2.0


@dataclass(frozen=True)
class Verified:
    """Input norm of every target block, and the errors that were found."""

    norms: dict[int, InputNorm]
    checks: Checks

    @property
    def centred(self) -> bool:
        return any(norm.centred for norm in self.norms.values())


def verify(
    view: ModelView, ids: Tensor, keep: Tensor, layers: Sequence[int], roles: Sequence[str]
) -> Verified:
    """Check the first sequences of the text, and random ids that repeat, on every target block.

    ids, keep: [sequence, position], right-padded. Raises ``SelfCheckError`` naming the block, the
    role, the figure and its tolerance, and the likely cause. Call inside ``view.quiet()``.
    """
    tolerance = TOLERANCES[view.dtype]
    last = max(layers)
    names = _names(view, last, layers, roles)
    cache: dict[str, list[Tensor]] = {}
    for rows, mask in (excerpt(ids, keep), probe(view)):
        streams, _ = view.run(rows, names, stop_at_layer=last + 1)
        for name, value in streams.items():
            cache.setdefault(name, []).append(value[mask.to(value.device)])
    merged = {name: torch.cat(parts) for name, parts in cache.items()}
    decomposition = _decomposition(view, merged, layers, tolerance)
    _context_free_embedding(view, cache, tolerance)
    _past_is_fixed(view, cache, last, tolerance)
    norms, read_in = _read_in(view, merged, layers, roles, tolerance)
    centring = [layer for layer, norm in norms.items() if norm.centred]
    if 0 < len(centring) < len(norms):
        others = [layer for layer in norms if layer not in centring]
        raise ModelError(
            f"blocks {_listed(centring)} read through a LayerNorm, which takes the mean out, and "
            f"blocks {_listed(others)} do not ({norms[others[0]].kind}): what can be seen of a "
            f"stream differs. Analyse them separately, with layers={tuple(others)} and without"
        )
    checks = Checks(
        torch.tensor([decomposition[layer] for layer in layers], dtype=torch.float64),
        tolerance,
        {role: torch.tensor(errors, dtype=torch.float64) for role, errors in read_in.items()},
        tolerance,
    )
    return Verified(norms, checks)


def _names(view: ModelView, last: int, layers: Sequence[int], roles: Sequence[str]) -> list[str]:
    names = [view.resid_pre(layer) for layer in range(last + 1)]
    for layer in range(last):
        names += view.writes(layer)
    for layer in layers:
        names += [view.hook(layer, HEAD_HOOKS[role]) for role in roles]
        if "OV" in roles:
            names += [
                view.hook(layer, name) for name in ("attn.hook_z", "attn.hook_out", "hook_attn_out")
            ]
    if "hook_pos_embed" in view.hooks and (
        view.adds_positions or view.positions_enter_queries_and_keys
    ):
        names.append("hook_pos_embed")
    return [name for name in dict.fromkeys(names) if name in view.hooks]


def excerpt(ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """The beginning of the first sequence, and its mask."""
    width = max(1, int(keep[0].sum()))
    width = min(width, PROBE_TOKENS)
    return ids[:1, :width], keep[:1, :width]


def probe(view: ModelView) -> tuple[Tensor, Tensor]:
    """Seeded ordinary ids whose second half repeats the first."""
    half = min(PROBE_TOKENS, view.n_ctx or PROBE_TOKENS) // 2
    low, high = view.d_vocab // 4, max(view.d_vocab // 2, view.d_vocab // 4 + 1)
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(low, high, (1, half), generator=generator)
    ids = torch.cat([first, first], dim=1)
    return ids, torch.ones_like(ids, dtype=torch.bool)


def _relative(difference: Tensor, reference: Tensor) -> float:
    """Largest over tokens of ‖difference‖ / ‖reference‖; 0 where both vanish."""
    size = torch.linalg.vector_norm(reference, dim=-1, dtype=torch.float64)
    error = torch.linalg.vector_norm(difference, dim=-1, dtype=torch.float64)
    ratio = torch.where(error == 0, 0.0, error / size)
    return float(ratio.max()) if bool(ratio.isfinite().all()) else float("inf")


def _decomposition(
    view: ModelView, cache: dict[str, Tensor], layers: Sequence[int], tolerance: float
) -> dict[int, float]:
    """Sum the writes in the model's own dtype and order, and compare before every block."""
    stream = cache[view.resid_pre(0)]
    errors = {0: 0.0}
    for layer in range(max(layers)):
        actual = cache[view.resid_pre(layer + 1)]
        for name in view.writes(layer):
            stream = stream.to(actual.device) + cache[name].to(actual.device)
        errors[layer + 1] = error = _relative(stream - actual, actual)
        if not bool(actual.isfinite().all()):
            raise SelfCheckError(
                f"block {layer}: the stream has NaN or infinite entries behind it; its weights "
                f"have such entries too, a hook makes them, or {actual.dtype} is too narrow for "
                f"this model: try bfloat16 or float32"
            )
        if error > tolerance:
            if layer not in view.attention_layers:
                raise SelfCheckError(
                    f"block {layer} has no attention, and its outputs "
                    f"({', '.join(view.writes(layer)) or 'none is hooked'}) add up to what it "
                    f"writes only within {error:.2g} of the stream's norm (tolerance "
                    f"{tolerance:g}): transformer-lens exposes no hook at the whole of this "
                    f"hybrid's mixer, or its scale is missing there"
                )
            raise SelfCheckError(
                f"block {layer + 1}: the embedding and the outputs of blocks 0-{layer} add up to "
                f"resid_pre only within {error:.2g} of its norm (tolerance {tolerance:g}). "
                f"{', '.join(view.writes(layer)) or 'No hook'} of block {layer} is not what the "
                f"block adds to the stream: a user hook edits it, a scale or a post-norm is "
                f"missing from it, or this release of transformer-lens wraps the architecture "
                f"wrongly (fixed in 4.x for OLMo 2, OPT, MPT, Granite and BLOOM)"
            )
    return errors


def _context_free_embedding(
    view: ModelView, parts: dict[str, list[Tensor]], tolerance: float
) -> None:
    """What is called the embedding must depend on the token alone, not on where it stands."""
    embed = parts[view.resid_pre(0)][1]
    if view.adds_positions:
        embed = embed - parts["hook_pos_embed"][1]
    half = len(embed) // 2
    error = _relative(embed[:half] - embed[half:], embed[:half])
    if error > tolerance:
        raise SelfCheckError(
            f"embed: the same token enters the stream as different vectors at different positions "
            f"({error:.2g} apart, tolerance {tolerance:g}), so blocks.0.hook_resid_pre minus "
            f"hook_pos_embed is not a token embedding in this model"
        )


def _past_is_fixed(
    view: ModelView, parts: dict[str, list[Tensor]], last: int, tolerance: float
) -> None:
    """The run reads what stop_at_layer returns, and pads texts on the right: so that stream must
    be the resid_pre of the hooks, and must not depend on tokens that come later."""
    ids = probe(view)[0]
    half = ids.shape[1] // 2
    later = ids.roll(1, dims=1)
    _, stopped = view.run(torch.cat([ids[:, :half], later[:, half:]], dim=1), [], last)
    if stopped is None:
        return
    hooked = parts[view.resid_pre(last)][1][:half]
    # The median, because a mixture of experts may send single tokens elsewhere on a rounding.
    size = torch.linalg.vector_norm(hooked, dim=-1, dtype=torch.float64)
    error = torch.linalg.vector_norm(stopped[0, :half] - hooked, dim=-1, dtype=torch.float64)
    middle = float(torch.where(error == 0, 0.0, error / size).median())
    if not middle <= tolerance:
        raise SelfCheckError(
            f"block {last}: the stream that stop_at_layer returns is {middle:.2g} away from "
            f"resid_pre of the same tokens with others behind them (tolerance {tolerance:g}). "
            f"Either the model is not causal, so that padding would change its figures, or this "
            f"release of transformer-lens cannot stop there"
        )


def _read_in(
    view: ModelView,
    cache: dict[str, Tensor],
    layers: Sequence[int],
    roles: Sequence[str],
    tolerance: float,
) -> tuple[dict[int, InputNorm], dict[str, list[float]]]:
    """The norm whose prediction fits all of a block's heads, and the error left, per role."""
    rounding = ROUNDINGS * torch.finfo(view.compute_dtype).eps
    norms: dict[int, InputNorm] = {}
    errors: dict[str, list[float]] = {role: [] for role in roles}
    for layer in layers:
        candidates = view.norm_candidates(layer)
        found: list[dict[str, float]] = []
        worst: list[float] = []
        for norm in candidates:
            found.append(_head_errors(view, cache, layer, roles, norm))
            worst.append(max(found[-1].values()))
            if worst[-1] <= rounding:
                break
        limit = min(tolerance, max(TIE * min(worst), rounding))
        chosen = next((i for i, error in enumerate(worst) if error <= limit), None)
        if chosen is None:
            best = worst.index(min(worst))
            role = max(found[best], key=found[best].__getitem__)
            raise SelfCheckError(
                f"block {layer}, role {role}: (x̄/s) A + b misses {HEAD_HOOKS[role]} by "
                f"{found[best][role]:.2g} of its size (tolerance {tolerance:g}), with "
                f"{candidates[best].describe()} as the closest input norm. W_{role} is not the "
                f"matrix that the block applies (transposed, permuted or swapped heads), the gain "
                f"follows another rule, or a hook edits the heads"
            )
        norms[layer] = candidates[chosen]
        for role in roles:
            errors[role].append(found[chosen][role])
    return norms, errors


def _head_errors(
    view: ModelView, cache: dict[str, Tensor], layer: int, roles: Sequence[str], norm: InputNorm
) -> dict[str, float]:
    """max |(x̄/s) A + b − hook| / max |hook| per role, each head on its own scale.

    b is whatever is constant over tokens; the probe's random ids keep that from hiding a fault.
    """
    dtype = view.compute_dtype
    stream = cache[view.resid_pre(layer)].to(dtype)
    normed = norm.centre(stream) / norm.scale(stream)
    errors = {}
    for role in roles:
        weight = view.read_in("V" if role == "OV" else role, layer, norm)
        actual = cache[view.hook(layer, HEAD_HOOKS[role])].to(weight)
        if actual.ndim == 2:
            actual = actual.unflatten(-1, (len(weight), -1))
        repeat = actual.shape[1] // len(weight)
        actual = actual[:, ::repeat]
        predicted = torch.einsum("td,hdk->thk", normed.to(weight.device), weight)
        if role in ("Q", "K") and view.positions_enter_queries_and_keys:
            positions = cache["hook_pos_embed"].to(weight)
            stored = view.read_in(role, layer, InputNorm("none", None, 0.0, "1"))
            predicted = predicted + torch.einsum("td,hdk->thk", positions, stored)
        rest = actual - predicted
        errors[role] = _largest_head_error(rest - rest.mean(0, keepdim=True), actual)
        if role == "OV":
            errors[role] = max(errors[role], _write_out_error(view, cache, layer, norm))
    return errors


def _largest_head_error(rest: Tensor, actual: Tensor) -> float:
    error = torch.linalg.vector_norm(rest, dim=-1, dtype=torch.float64).amax(0)
    size = torch.linalg.vector_norm(actual, dim=-1, dtype=torch.float64).amax(0)
    ratio = torch.where(error == 0, 0.0, error / size)
    return float(ratio.max()) if bool(ratio.isfinite().all()) else float("inf")


def _write_out_error(
    view: ModelView, cache: dict[str, Tensor], layer: int, norm: InputNorm
) -> float:
    """Σ_h z_h W_O + b against what attention hands on before any post-norm.

    That is attn.hook_out, but in BLOOM that one contains the residual and hook_attn_out does not.
    """
    weight = view.write_out(layer, norm)
    z = cache[view.hook(layer, "attn.hook_z")].to(weight)
    predicted = torch.einsum("thk,hkd->td", z.reshape(len(z), *weight.shape[:2]), weight)
    errors = []
    for name in ("attn.hook_out", "hook_attn_out"):
        if view.hook(layer, name) in cache:
            actual = norm.centre(cache[view.hook(layer, name)].to(weight))
            rest = actual - predicted
            rest = rest - rest.mean(0, keepdim=True)
            errors.append(_largest_head_error(rest.unsqueeze(1), actual.unsqueeze(1)))
    return min(errors)


def _listed(layers: Sequence[int]) -> str:
    shown = ", ".join(map(str, layers[:6]))
    return shown if len(layers) <= 6 else f"{shown}, …"
