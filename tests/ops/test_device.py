"""Choice of the device by name."""

import pytest
import torch

from yunque.core.errors import ConfigError
from yunque.ops.device import peak_memory_bytes, pick_device, synchronize


def test_names_of_devices():
    assert pick_device("cpu") == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert pick_device("auto").type == expected


def test_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="device is 'gpu'; valid: auto, cpu, cuda"):
        pick_device("gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is usable here")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(ConfigError, match="'cuda'"):
        pick_device("cuda")


def test_peak_memory_of_the_process_never_falls():
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(1 << 24)
    synchronize(torch.device("cpu"))
    after = peak_memory_bytes(torch.device("cpu"))
    assert block.numel() == 1 << 24
    assert after >= before > 1 << 20
