"""Models of any size, to be looked at: their weights have shapes and no values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import keras


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Models made inside have weights with shapes, but no values: enough for a plan, and no memory is needed.

    They cannot be used afterwards, and what else was made before loses its place in Keras's automatic names.
    """
    policy = keras.config.dtype_policy()
    try:
        with keras.StatelessScope(initialize_variables=False):
            yield
    finally:
        keras.utils.clear_session()  # else Keras would give the weights their values with the next model
        keras.config.set_dtype_policy(policy)  # which `clear_session` forgets


def count_parameters(model: keras.Model) -> int:
    """The number of trainable weights."""
    return sum(math.prod(weight.shape) for weight in model.trainable_weights)
