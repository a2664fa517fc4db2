"""The links megarl/kernels, megarl/parallel and megarl/recipes make megarl/ one ordinary tree;
nothing else is packaged.
"""

import re
from pathlib import Path

from setuptools import find_namespace_packages, setup

VERSION = Path(__file__).parent / "megarl" / "system" / "version.py"

setup(
    name="megarl",
    version=re.findall(r'^__version__ = "(.+)"', VERSION.read_text(), re.M)[0],
    description="RL post-training of language models that you can read, change and verify",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megarl", "megarl.*"]),
    package_data={
        "megarl.apps.launch": ["first_task/*"],
        "megarl.apps.runs": ["*.j2", "*.yaml"],
        "megarl.recipes": ["*.yaml"],
    },
    install_requires=[
        "torch>=2.13",
        "aiohttp",
        "cloudpickle",
        "deepspeed",
        "ray",
        "transformers",
        "sentencepiece",
        "numpy",
        "datasets",
        "httpx2",
        "jinja2",
        "jsonschema",
        "mpmath",
        "mcp",
        "prometheus_client",
        "psutil",
        "pydantic",
        "pyyaml",
        "pyzmq",
        "regex",
        "rich",
        "safetensors",
        "starlette",
        "tensorboard",
        "tqdm",
        "uvicorn",
        "xxhash",
    ],
    extras_require={
        # The engine, as tested; it chooses the build of torch. For CPUs see docs/howto/install.md:
        # vLLM's CPU build asks for packages that have no CPU build.
        "cuda": ["vllm==0.32.0"],
        # All its releases are pre-releases, which pip takes only where one is named.
        "flash-attn-4": ["flash-attn-4>=4.0.0b36"],
        # What the adapters to other libraries are written for: apps/adapters/packages.py.
        "reasoning-gym": ["reasoning-gym==0.1.25"],
        "gymnasium": ["gymnasium==1.4.0"],
        "textarena": ["textarena==0.7.4"],
        "openenv": ["openenv-core==0.3.0"],
        # The documentation as a site: mkdocs build -f tools/mkdocs.yml.
        "docs": ["mkdocs-material"],
    },
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
)
