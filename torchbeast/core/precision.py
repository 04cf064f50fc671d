"""The precision, float32 or bfloat16, of the learner's nets and of PolyBeast's agent."""

import functools

import torch


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Mixed precision for a forward pass: with `dtype` bf16, or with auto if that is faster."""
    return torch.autocast(device.type, torch.bfloat16, enabled=wants_bf16(device, dtype))


def wants_bf16(device: torch.device, dtype: str) -> bool:
    """Whether `dtype`, one of the flag's values, stands for bfloat16 on this device."""
    return dtype == "bf16" or (dtype == "auto" and computes_bf16(device.type))


@functools.cache
def computes_bf16(device_type: str) -> bool:
    """Whether such a device has instructions for bfloat16, so that it is faster than float32."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
