"""The user's data under the strategy: nothing is lost, nothing is copied.

With one replica a dataset needs no distribution. But Keras, wherever a model has a strategy, draws a batch from `fit`'s
data to learn its shapes, and throws it away; a Python generator never gives that batch again (3 of 6 batches were lost
under `tf.distribute.OneDeviceStrategy`). So Keras gets the kind of a batch instead of a batch. Where the kind does not
tell enough, Keras gets a batch, with which training then begins: what the data are opened and drawn for is the same as
in plain Keras.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_gpipe import compat
from tf_gpipe.errors import ArgumentError


class InputDataset(tf.data.Dataset, tf.distribute.DistributedDataset):
    """A dataset that Keras may look at without drawing from it. `fit` takes it like any dataset.

    Args:
        dataset: the user's `tf.data.Dataset`.
    """

    def __init__(self, dataset: tf.data.Dataset) -> None:
        self._dataset = dataset
        self._begun: tuple[Any, Iterator[Any]] | None = None  # the batch that was looked at, and those that follow it
        super().__init__(tf.data.experimental.to_variant(dataset))

    def _inputs(self) -> list[tf.data.Dataset]:
        return [self._dataset]

    def __iter__(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        if compat.model_being_prepared() is None:
            return iter(self._dataset if begun is None else _as_dataset(*begun))
        if _is_described(self._dataset.element_spec):
            return iter([tf.nest.map_structure(_none_if_optional, self._dataset.element_spec)])
        self._begun = begun or self._begin()
        return iter(self._begun[:1])

    def _begin(self) -> tuple[Any, Iterator[Any]]:
        batches = iter(self._dataset)
        for first in batches:
            return first, batches
        raise ArgumentError(
            "Expected a dataset of at least one batch where its element_spec does not tell the rank of every tensor: "
            f"shapes are learned from that batch. Received: an empty dataset with element_spec={self.element_spec}. "
            "Give it batches, or shapes (`tf.ensure_shape`; `output_signature` of `tf.data.Dataset.from_generator`)."
        )

    @property
    def element_spec(self) -> Any:
        """Structure of `tf.TypeSpec`s of a batch."""
        return self._dataset.element_spec


def _as_dataset(first: Any, others: Any) -> tf.data.Dataset:
    """A dataset, to be opened once, of a batch and those that a `tf.data.Iterator` still gives."""
    as_is = tf.autograph.experimental.do_not_convert
    drawn = tf.data.Dataset.from_tensors(0).repeat().map(as_is(lambda _: others.get_next_as_optional()))
    rest = drawn.take_while(as_is(lambda batch: batch.has_value())).map(as_is(lambda batch: batch.get_value()))
    options = tf.data.Options()
    options.autotune.enabled = False  # it would draw ahead once more
    return tf.data.Dataset.from_tensors(first).concatenate(rest).with_options(options)


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
