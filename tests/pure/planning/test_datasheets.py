"""Built-in devices and the scaling of a profile from one to another."""

import math

import pytest

from autopipe.errors import PlanError
from autopipe.planning.cost.datasheets import (
    DATASHEETS,
    datasheet,
    device_like,
    recognized,
    relative_speed,
    utilization,
)


def test_every_device_has_a_source_and_a_unique_name():
    assert len({sheet.name for sheet in DATASHEETS}) == len(DATASHEETS)
    for sheet in DATASHEETS:
        assert sheet.source
        assert sheet.memory_bytes >= 10**10
        assert sheet.tensor_flops > sheet.fp32_flops > 0
        assert relative_speed(sheet.name, sheet.name, "fp16").estimate == 1.0


def test_a_speed_is_between_the_ratios_of_bandwidths_and_peaks():
    speed = relative_speed("V100-16GB", "A100-80GB", "fp16")
    assert speed.low == pytest.approx(2039 / 900)
    assert speed.high == pytest.approx(312 / 125)
    assert speed.estimate == pytest.approx(math.sqrt(2039 / 900 * 312 / 125))
    assert speed.note == ("estimate from datasheets: 2.38 times the speed of V100-16GB, within 5% (2.27 to 2.50)")
    assert relative_speed("H100-80GB", "H200-141GB", "bf16").low == 1.0


def test_a_device_of_a_cluster_has_memory_and_speed():
    device = device_like("v100-16gb", "H200-141GB", "fp32")
    assert (device.name, device.memory_bytes) == ("H200-141GB", 141 * 10**9)
    assert device.speed == pytest.approx(math.sqrt(67 / 15.7 * 4800 / 900))


def test_an_unknown_device_is_refused():
    with pytest.raises(PlanError, match="Did you mean 'A100-80GB'"):
        datasheet("A100-80G")
    with pytest.raises(PlanError, match="unknown precision 'fp8'"):
        relative_speed("V100-16GB", "A100-80GB", "fp8")
    with pytest.raises(PlanError, match="V100-16GB has no bf16 matrix units"):
        relative_speed("V100-16GB", "A100-80GB", "bf16")


def test_the_datasheet_of_a_driver_name_is_recognized():
    assert recognized("NVIDIA A100-SXM4-80GB") == datasheet("A100-80GB")
    assert recognized("Intel Xeon") is None
    with pytest.raises(PlanError, match="'NVIDIA A100', which may be A100-40GB or A100-80GB"):
        recognized("NVIDIA A100")


def test_utilization_is_relative_to_the_peak_of_the_precision():
    assert utilization(395.8e12, "NVIDIA H100 80GB HBM3", "bf16") == pytest.approx(0.4)
    assert utilization(33.5e12, "NVIDIA H100 80GB HBM3", "fp32") == pytest.approx(0.5)
    assert utilization(1e12, "AMD EPYC 7B12", "fp32") is None
    assert utilization(1e12, "Tesla V100-SXM2-16GB", "bf16") is None
