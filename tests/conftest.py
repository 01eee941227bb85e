"""Eight logical CPU devices for every test, which TensorFlow must make when it starts; and the order of files."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import pytest
import tensorflow as tf

import tf_gpipe

tf_gpipe.set_logical_cpus(8)
tf.config.threading.set_inter_op_parallelism_threads(4)

FIRST = (
    "recurrent layers imagenet_amoebanet random_models transparency batch_norm fit_options training_schemes randomness "
    "layer_changes saving remat translation tracing inputs state examples docs benchmarks updates policies "
    "custom_training model_tools errors_strategy keras_suite models tpu doctor applications"
)
"""Files that take longest, in that order: begun last, one of them would run alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of long files first."""
    order = {f"test_{name}": place for place, name in enumerate(FIRST.split())}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
