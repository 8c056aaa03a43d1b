"""Fourier transforms."""

from __future__ import annotations

from typing import Any

from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of, number


def dft(call: Call, x: Tensor, length: Any = None, axis: Any = None) -> Tensor:
    """ONNX DFT of real (..., 1) or complex (..., 2) values; the axis is an attribute before opset 20."""
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
    """ONNX STFT of real (N, T, 1) or complex (N, T, 2) values → (N, frames, bins, 2).

    Raises:
        Unfit: neither the frame length nor a window is given.
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
    """Convert the last axis of size 1 or 2 to real or complex values."""
    return call.torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x.squeeze(-1)


def _spectrum(call: Call, values: Tensor, count: int | None, dim: int, *, one_sided: bool) -> Tensor:
    """Compute the Fourier transform, with real and imaginary parts on the last axis.

    Raises:
        Unfit: a one-sided spectrum of complex values.
    """
    if one_sided and values.is_complex():
        raise Unfit("half a spectrum stands for the whole of real values only")
    function = call.torch.fft.rfft if one_sided else call.torch.fft.fft
    return call.torch.view_as_real(function(values, count, dim))
