"""Images for training and evaluation, from TensorFlow Datasets or from a folder.

Images are read as the bytes of their files; of a JPEG, only the part that the crop keeps is decoded. What an example
becomes depends on the seed, the epoch and the example's place in it and on nothing else, so a training that is resumed
sees the same data.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

SHUFFLE_BUFFER = 16384  # files of images, about 2 GB of ImageNet
DISTORTION = (32 / 255, 0.1, 0.1)  # most that is added to brightness and to both colour differences
RGB_OF_YCBCR = np.array([[1, 0, 1.402], [1, -0.344136, -0.714136], [1, 1.772, 0]], "float32")


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What is done to training images.

    Attributes:
        crop: "inception" for a random part of at least a tenth of the image, stretched by up to 4:3; "full" for none.
        flip: whether half of them are mirrored.
        colour: whether brightness and colours are changed.
        rand_augment: strength of Keras's RandAugment, from 0 (none) to 1.
        cutout: side in pixels of a square that is made grey; 0 for none.
    """

    crop: str = "inception"
    flip: bool = True
    colour: bool = True
    rand_augment: float = 0.0
    cutout: int = 0


def open_data(name: str, data_dir: str | None = None) -> tfds.core.DatasetBuilder:
    """Finds a data set.

    Args:
        name: of TensorFlow Datasets, or `folder:PATH` for files named PATH/split/class/image.
        data_dir: where TensorFlow Datasets keeps data; its own place by default.

    Raises:
        ValueError: there is none of this name, or the folder has no such files.
    """
    if name.startswith("folder:"):
        root = Path(name.removeprefix("folder:"))
        builder = tfds.folder_dataset.ImageFolder(str(root)) if root.is_dir() else None
        if builder is None or not _splits(builder):
            raise ValueError(
                f"Expected images (.jpg, .jpeg, .png) in {root}/split/class, such as {root}/train/cat/1.jpg. "
                f"Received: {'a folder without any there' if builder else 'no such folder'}."
            )
        return builder
    return tfds.builder(name, data_dir=data_dir, try_gcs=False)


def prepare(builder: tfds.core.DatasetBuilder) -> None:
    """Downloads a data set if it is not there.

    Raises:
        ValueError: a user must fetch it; TensorFlow Datasets' text says how.
        OSError: it could not be downloaded or written.
    """
    if isinstance(builder, tfds.folder_dataset.ImageFolder):
        return
    try:
        builder.download_and_prepare()
    except AssertionError as error:  # which TensorFlow Datasets raises where files of the user are not there
        raise ValueError(f"Expected the files of '{builder.name}'. Received: {error}") from error


class BrokenFileError(ValueError):
    """Files of a data set that are named as images cannot be read as such."""


@contextlib.contextmanager
def naming_broken_files(builder: tfds.core.DatasetBuilder) -> Iterator[None]:
    """Where TensorFlow fails inside, and files of the user's folder cannot be read, an error names them.

    Raises:
        BrokenFileError: some files are broken.
    """
    try:
        yield
    except tf.errors.OpError as error:
        broken = _broken_files(builder)
        if not broken:
            raise
        more = f" and {len(broken) - 1} more like it" if len(broken) > 1 else ""
        raise BrokenFileError(
            f"Expected files that can be read as images. Received: {broken[0]}{more}. Mend or remove "
            f"{'them' if more else 'it'}, and run the same command again."
        ) from error


def _broken_files(builder: tfds.core.DatasetBuilder) -> list[str]:
    """Names of all files in a user's folder that are no images; of a data set of TensorFlow Datasets, none."""
    if not isinstance(builder, tfds.folder_dataset.ImageFolder):
        return []
    broken = []
    for split in _splits(builder):
        for example in builder.as_dataset(split=split, decoders={"image": tfds.decode.SkipDecoding()}):
            try:
                tf.io.decode_image(example["image"], expand_animations=False)
            except tf.errors.OpError:
                broken.append(example["image/filename"].numpy().decode())
    return sorted(broken)


def num_classes(builder: tfds.core.DatasetBuilder) -> int:
    """The number of classes of a data set."""
    return builder.info.features[_keys(builder)[1]].num_classes


def steps_per_epoch(builder: tfds.core.DatasetBuilder, batch_size: int, split: str = "train") -> int:
    """The number of whole mini-batches in a split."""
    if split not in _splits(builder):
        raise ValueError(
            f"Expected a data set with images in a split to train on, '{split}'. Received: '{builder.name}' with "
            f"images in {_splits(builder)}."
        )
    count = builder.info.splits[split].num_examples
    if count < batch_size:
        raise ValueError(
            f"Expected mini-batches of at most {count} images, of which '{split}' of '{builder.name}' has no more. "
            f"Received: batch size {batch_size}. Take a smaller one."
        )
    return count // batch_size


def evaluation_split(builder: tfds.core.DatasetBuilder) -> str:
    """The split to evaluate on: validation, else test."""
    found = [split for split in ("validation", "test") if split in _splits(builder)]
    if not found:
        raise ValueError(
            "Expected a data set with images in a split to evaluate on, validation or test. Received: "
            f"'{builder.name}' with images in {_splits(builder)}."
        )
    return found[0]


def training_images(
    builder: tfds.core.DatasetBuilder,
    image_size: int,
    batch_size: int,
    *,
    epochs: range,
    augmentation: Augmentation = Augmentation(),
    seed: int = 0,
    split: str = "train",
) -> tf.data.Dataset:
    """Mini-batches of images and one-hot labels, of several epochs one after another.

    Args:
        builder: the data set.
        image_size: height and width that images are brought to.
        batch_size: images of a mini-batch; each epoch leaves out those that do not fill one.
        epochs: numbers of the epochs.
        augmentation: what is done to the images.
        seed: of the order of images and of what is done to them.
        split: the part of the data set.
    """
    used = steps_per_epoch(builder, batch_size, split) * batch_size

    def examples_of(epoch: tf.Tensor) -> tf.data.Dataset:
        tf.random.set_seed(1)  # in this function: where it is 0, `shuffle` takes no tensor as its seed
        order = tf.random.stateless_uniform([], [seed, epoch], minval=None, maxval=None, dtype=tf.int64)
        examples = _read(builder, split, order).shuffle(SHUFFLE_BUFFER, order, reshuffle_each_iteration=False)
        return examples.take(used).enumerate(epoch * used)

    image_of = training_image(image_size, augmentation)

    def prepared(number: tf.Tensor, example: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        data, label = example
        return image_of(data, [seed, number]), label

    examples = tf.data.Dataset.range(epochs.start, epochs.stop).flat_map(examples_of)
    return _batches(examples.map(prepared, tf.data.AUTOTUNE, deterministic=True), batch_size, num_classes(builder))


def evaluation_images(
    builder: tfds.core.DatasetBuilder, image_size: int, batch_size: int, fraction: float = 0.875
) -> tf.data.Dataset:
    """Mini-batches of all images to evaluate on, and one-hot labels.

    Args:
        builder: the data set.
        image_size: height and width that images are brought to.
        batch_size: images of a mini-batch; the last may have fewer.
        fraction: how much of an image's height and width is kept, in the middle.
    """

    def prepared(data: tf.Tensor, label: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return evaluation_image(data, image_size, fraction), label

    examples = _read(builder, evaluation_split(builder))
    return _batches(examples.map(prepared, tf.data.AUTOTUNE, deterministic=True), batch_size, num_classes(builder))


def training_image(size: int, augmentation: Augmentation) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """A function that makes an image with pixels from -1 to 1 of the bytes of its file.

    Its second argument is a seed of two whole numbers; the same ones make the same image.

    Args:
        size: height and width of the image.
        augmentation: what is done to it.
    """
    rand_augment = RandAugment(augmentation.rand_augment)

    def image_of(data: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        seeds = tf.unstack(tf.random.experimental.stateless_split(seed, 5))
        window = inception_window(seeds[0]) if augmentation.crop == "inception" else central_window(1.0)
        image = tf.image.resize(decode(data, window), [size, size]) / 255
        if augmentation.flip:
            image = tf.image.stateless_random_flip_left_right(image, seeds[1])
        if augmentation.colour:
            change = tf.random.stateless_uniform([3], seeds[2], -1.0, 1.0) * DISTORTION
            image = tf.clip_by_value(image + tf.linalg.matvec(RGB_OF_YCBCR, change), 0.0, 1.0)
        if augmentation.rand_augment:
            image = rand_augment(image, seeds[3])
        if augmentation.cutout:
            image = cutout(image, augmentation.cutout, seeds[4])
        return tf.ensure_shape(2 * image - 1, [size, size, 3])

    return image_of


def evaluation_image(data: tf.Tensor, size: int, fraction: float) -> tf.Tensor:
    """The middle of an image, with pixels from -1 to 1, made from the bytes of its file."""
    image = tf.image.resize(decode(data, central_window(fraction)), [size, size]) / 255
    return tf.ensure_shape(2 * image - 1, [size, size, 3])


def decode(data: tf.Tensor, window: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """A part of an image, in RGB.

    Args:
        data: the bytes of its file: JPEG, PNG, GIF or BMP.
        window: gives the part's top, left, height and width for an image of a shape.
    """

    def part_of_jpeg() -> tf.Tensor:
        return tf.image.decode_and_crop_jpeg(data, window(tf.image.extract_jpeg_shape(data)), channels=3)

    def part_of_another() -> tf.Tensor:
        image = tf.image.decode_image(data, channels=3, expand_animations=False)
        return tf.image.crop_to_bounding_box(image, *tf.unstack(window(tf.shape(image))))

    return tf.cond(tf.io.is_jpeg(data), part_of_jpeg, part_of_another)


def central_window(fraction: float) -> Callable[[tf.Tensor], tf.Tensor]:
    """The middle of an image, a fraction of its height and width but at least a pixel, as `decode` takes it."""

    def window(shape: tf.Tensor) -> tf.Tensor:
        extent = tf.cast(tf.round(tf.cast(shape[:2], tf.float32) * fraction), tf.int32)
        extent = tf.maximum(extent, 1)
        return tf.concat([(shape[:2] - extent) // 2, extent], 0)

    return window


def inception_window(seed: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    """A random part of an image, at least a tenth of it, of a shape from 3:4 to 4:3, as `decode` takes it."""

    def window(shape: tf.Tensor) -> tf.Tensor:
        begin, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            tf.zeros([1, 0, 4]),
            seed,
            min_object_covered=0.1,
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.1, 1.0),
            use_image_if_no_bounding_boxes=True,
        )
        return tf.concat([begin[:2], extent[:2]], 0)

    return window


def cutout(image: tf.Tensor, side: int, seed: tf.Tensor) -> tf.Tensor:
    """Makes a square grey whose centre is anywhere in the image."""
    size = tf.shape(image)[:2]
    centre = tf.random.stateless_uniform([2], seed) * tf.cast(size, tf.float32)
    rows, columns = (abs(tf.range(size[k], dtype=tf.float32) + 0.5 - centre[k]) < side / 2 for k in (0, 1))
    return tf.where((rows[:, None] & columns)[..., None], 0.5, image)


class RandAugment:
    """RandAugment of images with pixels from 0 to 1.

    Keras's layer draws from a state, which images that are made at the same time would share. Here each image has a
    seed of its own.

    Args:
        strength: from 0 to 1.
    """

    def __init__(self, strength: float) -> None:
        self.layer = keras.layers.RandAugment(value_range=(0, 1), factor=strength)
        self.layer.generator = ExampleSeeds()

    def __call__(self, image: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        """Returns the changed image."""
        self.layer.generator.begin(seed)
        return self.layer(image, training=True)


class ExampleSeeds(keras.random.SeedGenerator):
    """Gives seeds made from one seed, a tensor."""

    def __init__(self) -> None:
        super().__init__(0)

    def begin(self, seed: tf.Tensor) -> None:
        """Sets the seed that the next ones are made from."""
        self.seed = seed
        self.count = 0

    def next(self, ordered: bool = True) -> tf.Tensor:
        """Returns a new seed."""
        self.count += 1
        return tf.random.experimental.stateless_fold_in(self.seed, self.count)


def _splits(builder: tfds.core.DatasetBuilder) -> list[str]:
    """Names of the splits that have images."""
    return sorted(name for name, split in builder.info.splits.items() if split.num_examples)


def _keys(builder: tfds.core.DatasetBuilder) -> tuple[str, str]:
    """Names of the image and of the label in an example."""
    keys = builder.info.supervised_keys
    if keys is None or not isinstance(builder.info.features[keys[1]], tfds.features.ClassLabel):
        raise ValueError(
            f"Expected a data set of images with a class each. Received: '{builder.name}' with keys {keys}."
        )
    return keys[0], keys[1]


@tf.autograph.experimental.do_not_convert
def _read(builder: tfds.core.DatasetBuilder, split: str, seed: tf.Tensor | None = None) -> tf.data.Dataset:
    """Bytes of images and labels of a split; with a seed, its files in a random order."""
    image, label = _keys(builder)
    several_files = builder.info.splits[split].num_shards > 1
    examples = builder.as_dataset(
        split=split,
        shuffle_files=seed is not None and several_files,
        decoders={image: tfds.decode.SkipDecoding()},
        read_config=tfds.ReadConfig(
            shuffle_seed=seed, shuffle_reshuffle_each_iteration=False, try_autocache=False, skip_prefetch=True
        ),
    )
    return examples.map(lambda example: (example[image], example[label]))


def _batches(examples: tf.data.Dataset, batch_size: int, count: int) -> tf.data.Dataset:
    labelled = examples.map(lambda image, label: (image, tf.one_hot(label, count)))
    return labelled.batch(batch_size).prefetch(tf.data.AUTOTUNE)
