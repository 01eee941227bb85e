"""Keras's tests that rightly end otherwise under the strategy, each with its reason, as in `docs/keras_suite.md`."""

import fnmatch
import typing


class Difference(typing.NamedTuple):
    """Tests whose names match a pattern, what their failure says, and why it is right."""

    pattern: str
    says: str
    reason: str

    def covers(self, name: str, message: str) -> bool:
        return fnmatch.fnmatchcase(name, self.pattern) and self.says in message


EXPECTED: list[Difference] = []

OWN_STRATEGY = [
    "backend/tensorflow/distribute_test.py::*",
    "trainers/data_adapters/tf_dataset_adapter_test.py::*::test_distributed_datasets_from_function_*",
]
"""Tests that open another strategy, which TensorFlow refuses inside one: they run after ours was used and left."""
