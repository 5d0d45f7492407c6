from __future__ import annotations

from triaccel_ray.service.doctor import Verdict, _no_nvml


def test_without_nvml_a_gpu_is_of_no_use_and_a_cpu_does_without() -> None:
    error = RuntimeError("NVML Shared Library Not Found\nsecond line")
    gpu, cpu = _no_nvml(error, has_gpu=True), _no_nvml(error, has_gpu=False)
    assert (gpu.verdict, cpu.verdict) == (Verdict.PROBLEM, Verdict.NOTE)
    assert "a run on the GPU fails" in gpu.text
    assert "resident set" in cpu.text
    assert not any("second line" in finding.text for finding in (gpu, cpu))
