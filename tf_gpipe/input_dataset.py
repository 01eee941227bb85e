"""The user's data under the strategy: nothing is lost, nothing is copied.

With one replica a dataset needs no distribution. But Keras, wherever a model has a strategy, draws a batch from `fit`'s
data to learn its shapes, and throws it away; a Python generator never gives that batch again (3 of 6 batches were lost
under `tf.distribute.OneDeviceStrategy`). So Keras gets the kind of a batch instead of a batch. Where the kind does not
tell enough, it gets a batch, and the first epoch gets the same batch and those after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_gpipe import compat


class InputDataset(tf.data.Dataset, tf.distribute.DistributedDataset):
    """A dataset that Keras may look at without drawing from it. `fit` takes it like any dataset.

    Args:
        dataset: the user's `tf.data.Dataset`.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self._opened: tuple[list[Any], Iterator[Any]] | None = None
        super().__init__(tf.data.experimental.to_variant(dataset))

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    def __iter__(self) -> Iterator[Any]:
        if compat.model_being_prepared() is not None:
            if _is_described(self._dataset.element_spec):
                return iter([tf.nest.map_structure(_none_if_optional, self._dataset.element_spec)])
            rest = iter(self._dataset)
            self._opened = list(itertools.islice(rest, 1)), rest
            return iter(self._opened[0])
        opened, self._opened = self._opened, None
        if opened is None:
            return iter(self._dataset)
        # Keras wants an iterator of TensorFlow, to draw from inside its step.
        given_back = tf.data.Dataset.from_generator(
            lambda: itertools.chain(*opened), output_signature=self._dataset.element_spec
        )
        return iter(given_back)

    @property
    def element_spec(self) -> Any:
        """Structure of `tf.TypeSpec`s of a batch."""
        return self._dataset.element_spec


def _is_described(spec: Any) -> bool:
    """Whether a batch's kind tells all that its shapes would: everything but the number of rows."""
    for leaf in tf.nest.flatten(tf.nest.map_structure(_none_if_optional, spec)):
        if leaf is None:
            continue
        shape = getattr(leaf, "shape", None)
        if shape is None or shape.rank is None:
            return False
    return True


def _none_if_optional(leaf: Any) -> Any:
    """Keras passes None, such as no sample weights, through a dataset as an empty `tf.experimental.Optional`."""
    return None if isinstance(leaf, tf.OptionalSpec) else leaf
