"""Writes scikit-learn's handwritten digits as a data set of TensorFlow Datasets, to try the ImageNet example on.

python examples/amoebanet/sklearn_digits.py data  # then: --data sklearn_digits --data-dir data
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import sklearn.datasets
import sklearn.model_selection
import tensorflow_datasets as tfds


class SklearnDigits(tfds.core.GeneratorBasedBuilder):
    """Grey images of 8x8 pixels: 1440 to train on and 357 to test with."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> tfds.core.DatasetInfo:
        features = {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
        keys = ("image", "label")
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=keys)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        images, labels = sklearn.datasets.load_digits(return_X_y=True)
        images = np.rint(images.reshape(-1, 8, 8, 1) * 255 / 16).astype("uint8")
        train_images, test_images, train_labels, test_labels = sklearn.model_selection.train_test_split(
            images, labels, test_size=357, stratify=labels, random_state=0
        )
        return {
            "train": self._generate_examples(train_images, train_labels),
            "test": self._generate_examples(test_images, test_labels),
        }

    def _generate_examples(self, images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        for i, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield i, {"image": image, "label": label}


if __name__ == "__main__":
    SklearnDigits(data_dir=sys.argv[1]).download_and_prepare()
