"""The packages of the wheel: gpt2_accel/ and four folders beside it. setup.cfg has the rest."""

from setuptools import find_packages, setup

FOLDERS = ("accelerate_configs", "benchmarks", "course", "recipes")
beside = {f"gpt2_accel.{name}": name for name in FOLDERS}
setup(
    packages=[*find_packages(include=["gpt2_accel*"]), *beside],
    package_dir={"gpt2_accel": "gpt2_accel", **beside},
)
