"""The links megarl/kernels and megarl/parallel make megarl/ one ordinary tree; nothing else is
packaged.
"""

from setuptools import find_namespace_packages, setup

setup(
    name="megarl",
    version="0.1.0",
    description=(
        "Reinforcement learning of language models on long chains of thought, under any parallel"
        " layout"
    ),
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_namespace_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl.apps.runs": ["*.j2"]},
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
        "math-verify",
        "mcp",
        "prometheus_client",
        "psutil",
        "pydantic",
        "pyyaml",
        "pyzmq",
        "regex",
        "safetensors",
        "starlette",
        "tensorboard",
        "tqdm",
        "uvicorn",
        "xxhash",
    ],
    extras_require={
        # All its releases are pre-releases, which pip takes only where one is named.
        "flash-attn-4": ["flash-attn-4>=4.0.0b36"],
        # The documentation as a site: mkdocs build -f tools/mkdocs.yml.
        "docs": ["mkdocs-material"],
    },
    entry_points={"console_scripts": ["megarl = megarl.cli:main"]},
)
