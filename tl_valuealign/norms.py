"""What a block's input norm does to the stream."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class InputNorm:
    """What a block does to the stream before its attention reads it.

    ``kind``: "LayerNorm" (centres), "RMSNorm" or "none". ``gain`` [d_model] as it multiplies, so
    1 + w where the model stores w; None for no gain. ``eps`` is added under the root.
    """

    kind: str
    gain: Tensor | None
    eps: float
    gain_rule: str

    @property
    def centred(self) -> bool:
        return self.kind == "LayerNorm"

    def centre(self, stream: Tensor) -> Tensor:
        """x̄, in the dtype of the stream."""
        return stream - stream.mean(-1, keepdim=True) if self.centred else stream

    def scale(self, stream: Tensor) -> Tensor:
        """s(x) [..., 1]: 1 without a norm, else √(mean x̄² + eps)."""
        if self.kind == "none":
            return torch.ones_like(stream[..., :1])
        return (self.centre(stream).square().mean(-1, keepdim=True) + self.eps).sqrt()

    def describe(self) -> str:
        return self.kind if self.gain is None else f"{self.kind} with gain {self.gain_rule}"
