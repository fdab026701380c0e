"""`gpt2-accel doctor`: does training work here, and which launch config fits?"""

from gpt2_accel.runtime.cores import may_have_gpu, missing_gpu, usable_cpus


def main() -> None:
    """Prints the versions, the device, whether compilation works, and the launch config. A broken installation raises the
    error of the import."""
    import torch

    import gpt2_accel.train  # noqa: F401  all that training imports
    from gpt2_accel.hf.model_card import installed_versions
    from gpt2_accel.runtime.device import (
        device_name,
        inductor_problem,
        launch_device,
        total_memory,
    )
    from gpt2_accel.runtime.files import first_line

    print(", ".join(f"{name} {version}" for name, version in installed_versions().items()))
    device = launch_device()
    memory = total_memory(device) / 1e9
    print(f"{device_name(device)}, {memory:.0f} GB, {usable_cpus()} CPU cores")
    if device.type == "cpu" and may_have_gpu():
        print(missing_gpu())
    compiles = "torch.compile works"
    if problem := inductor_problem(device):
        compiles = f"{problem}: runs are not compiled"
    else:
        try:
            torch.compile(torch.sin)(torch.ones(100, device=device))
        except Exception as error:  # any of inductor's or the compiler's
            compiles = (
                f"torch.compile fails ({first_line(error)}): install g++ and Python's header files, or launch with "
                "--dynamo_backend no"
            )
    print(compiles)
    print(f"Training works here: gpt2-accel launch {' '.join(fitting_launch())} RECIPE")


def fitting_launch() -> list[str]:
    """Returns the name of the shipped launch config that fits this machine, and the launcher's flags that it needs."""
    if not may_have_gpu():
        return ["cpu"]
    from gpt2_accel.runtime.device import accelerator_count, has_bf16, launch_device

    device = launch_device()
    return fitting(device.type, accelerator_count(), has_bf16(device))


def fitting(kind: str, gpus: int, bf16: bool) -> list[str]:
    """Returns what `fitting_launch` returns, for `gpus` devices of a type such as `cuda`.

    A CPU gets `cpu` also if it has bf16 units: compiled bf16, which is faster, takes a minute to start.
    """
    if kind in ("cpu", "mps"):
        return [kind]
    if gpus == 1:
        return ["1xgpu" if bf16 else "1xt4-fp16"]
    if bf16 and gpus == 4:
        return ["4xa100"]
    name, count = ("8xa100", 8) if bf16 else ("2xt4-fp16", 2)
    return [name] if gpus == count else [name, "--num_processes", str(gpus)]


if __name__ == "__main__":
    main()
