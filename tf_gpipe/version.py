"""The version of the package, in the one place that `setup.py` and `tf_gpipe.__version__` read."""

__version__ = "0.1.0"
