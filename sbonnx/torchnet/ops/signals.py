"""Fourier transforms."""

from __future__ import annotations

from typing import Any

from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of, number


def dft(call: Call, x: Tensor, length: Any = None, axis: Any = None) -> Tensor:
    """ONNX DFT of (..., 1) real or (..., 2) complex values; the axis is an attribute before opset 20."""
    default = call.integer("axis", 1) if call.opset < 20 else -2
    dim = axis_of(default if axis is None else int(number(axis)), x.dim())
    count = None if length is None else int(number(length))
    inverse, half = call.integer("inverse", 0), call.integer("onesided", 0)
    values = _values(call, x)
    if inverse and half:
        return call.torch.fft.irfft(values, count, dim).unsqueeze(-1)
    if inverse:
        return call.torch.view_as_real(call.torch.fft.ifft(values, count, dim))
    return _spectrum(call, values, count, dim, one_sided=bool(half))


def stft(call: Call, x: Tensor, step: Any, window: Tensor | None = None, length: Any = None) -> Tensor:
    """ONNX STFT of (N, T, 1) real or (N, T, 2) complex values → (N, frames, bins, 2).

    Raises:
        Unfit: nothing says how long a frame is.
    """
    if length is not None:
        count = int(number(length))
    elif window is not None:
        count = int(window.shape[0])
    else:
        raise Unfit("it has neither a window nor a length of frames")
    frames = _values(call, x).unfold(1, count, int(number(step)))
    frames = frames if window is None else frames * window
    return _spectrum(call, frames, count, 2, one_sided=bool(call.integer("onesided", 1)))


def _values(call: Call, x: Tensor) -> Tensor:
    """Real or complex numbers, by what the last axis holds."""
    return call.torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)


def _spectrum(call: Call, values: Tensor, count: int | None, dim: int, *, one_sided: bool) -> Tensor:
    """The transform with its real and imaginary parts last.

    Raises:
        Unfit: half of the spectrum of complex values.
    """
    if one_sided and values.is_complex():
        raise Unfit("half a spectrum stands for the whole of real values only")
    function = call.torch.fft.rfft if one_sided else call.torch.fft.fft
    return call.torch.view_as_real(function(values, count, dim))
