"""Tensors of several kinds that share memory, for tests of the ways by which tensors of a device pass."""

from __future__ import annotations

from typing import Any

import torch

from helpers.fake_device_driver import FakeDeviceDriver


def make_views(driver: FakeDeviceDriver, length: int) -> list[Any]:
    """Views of a tensor with `length` elements and of a small one: reshaped, of another dtype, a parameter, transposed,
    without elements, one that requires a gradient; and a tensor without memory."""
    large, small = driver.tensor(length), driver.tensor(60)
    large.copy_(torch.arange(float(length)))
    small.copy_(torch.arange(60.0))
    return [
        large[1001:].view(-1, 1), large[1_000_001:].view(torch.int32), torch.nn.Parameter(small[:7]),
        small.view(6, 10).t(), small[3:3], large[5:6].requires_grad_(), driver.tensor(0),
    ]  # fmt: skip


def are_views(tensors: list[Any], length: int) -> bool:
    """Whether these are as `make_views` has made them; most of it is asserted."""
    rest, integers, parameter, turned, nothing, graded, empty = tensors
    assert torch.equal(rest[:, 0], torch.arange(1001.0, length))
    assert rest.untyped_storage().data_ptr() == integers.untyped_storage().data_ptr(), "they share it again"
    assert torch.equal(integers, torch.arange(1_000_001.0, length).view(torch.int32))
    assert type(parameter) is torch.nn.Parameter and parameter.tolist() == list(range(7))
    assert torch.equal(turned, torch.arange(60.0).view(6, 10).t()) and turned.stride() == (1, 10)
    assert nothing.numel() == 0 == empty.numel()
    return bool(graded.requires_grad) and graded.tolist() == [5.0] and not turned.requires_grad
