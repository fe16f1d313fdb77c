"""Metadata is in pyproject.toml; how the extension is built is in build_support/."""

from setuptools import Extension, setup

from build_support.build_ext import BuildExt

setup(
    license="BSD-3-Clause",  # here, because older and newer setuptools want it spelled differently in pyproject.toml
    ext_modules=[Extension("flash_attn_ext._C", sources=[])],
    cmdclass={"build_ext": BuildExt},
)
