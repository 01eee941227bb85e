"""Metadata of the package; the settings of the tools are in pyproject.toml."""

import runpy
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"

DRAW = ["matplotlib"]
EXAMPLES = [
    "Django",
    "Pillow",
    "babel",
    "importlib_resources",  # which tensorflow-datasets 4.9.10 imports and does not require
    "sacrebleu",
    "scikit-learn",
    "sentencepiece",
    "tensorboard",
    "tensorflow-datasets",
]

setup(
    name="tf_gpipe",
    version=runpy.run_path(str(ROOT / "tf_gpipe" / "version.py"))["__version__"],
    description="GPipe pipeline parallelism for TensorFlow 2 and Keras 3: one strategy scope, nothing else changes",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=["tf_gpipe"],
    # With their folder named, `pip install -e` leaves a plain path, which type checkers and editors can follow.
    package_dir={"": "."},
    package_data={"tf_gpipe": ["py.typed"]},
    entry_points={"console_scripts": ["tf_gpipe = tf_gpipe.cli:main"]},
    zip_safe=False,
    python_requires=">=3.10",
    # TensorFlow comes in one wheel for each kind of device, and requiring one would install it beside the user's own:
    # choose by an extra.
    install_requires=["keras>=3.12,<4", "numpy"],
    extras_require={
        "cpu": ["tensorflow-cpu>=2.19,<2.22"],
        "gpu": ["tensorflow[and-cuda]>=2.19,<2.22"],
        # No TPU wheel exists after 2.20, which a libtpu of today ends at import ("… not available in this library").
        "tpu": ["tensorflow-tpu>=2.19,<2.21", "libtpu<0.0.15"],
        "hub": ["keras-hub>=0.32; python_version >= '3.11'"],  # Its tests are skipped without it.
        "draw": DRAW,  # PNG files; SVG and text need nothing.
        "examples": EXAMPLES,
        "benchmarks": ["torch", "torchgpipe", *DRAW, *EXAMPLES],
        "dev": ["hypothesis", "mypy", "pydot", "pyright[nodejs]", "pytest", "pytest-xdist", "ruff", *DRAW, *EXAMPLES],
    },
    keywords=["tensorflow", "keras", "gpipe", "pipeline parallelism", "model parallelism", "rematerialisation"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "License :: OSI Approved :: Apache Software License",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
