"""AmoebaNet-D on handwritten digits: a pipeline whose layers pass pairs of tensors.

Every AmoebaNet cell takes two tensors, the outputs of the two cells before it, and hands two tensors on. A pipeline
that carries a single tensor from layer to layer cannot train such a network; here a cut between two cells simply has
two boundary tensors. The network is the AmoebaNet-D of the GPipe paper (arXiv:1811.06965), shrunk to scikit-learn's
grey digits of 8x8 pixels: both cells have their real genotype, but there is one normal cell where the paper has six
or more, no strided stem, and the kernels 1x7 and 7x1, wider than most of these images, are 1x3 and 3x1.

    python examples/digits_amoebanet.py                                    # 4 stages, 4 micro-batches, about two minutes
    python examples/digits_amoebanet.py --stages 2 --micro-batches 8 --remat always
    python examples/digits_amoebanet.py --quick                            # one epoch on 256 images, for the tests

The stages run on logical CPU devices of this machine. The script prints the plan (which layers each stage holds),
Keras's own progress bars, the accuracy on 357 images that were held out, and the largest difference that the number
of stages makes to any weight:

    test accuracy 99.2 %
    4 stages and 1 stage: largest difference of any weight 1.2e-07

Both figures vary a little from machine to machine. The exit code is 1 when the accuracy is below 95 % (not asked of
--quick) or when the difference is above 1e-5.
"""

import argparse
import sys
from typing import NamedTuple

import keras
import numpy as np
import sklearn.datasets
import sklearn.model_selection

import tf_gpipe

NORMAL_CELLS = 3  # one third of them at each of the image sizes 8x8, 4x4 and 2x2
FILTERS = 16  # of the first third; each reduction cell doubles them
LEAST_ACCURACY = 0.95
LARGEST_DIFFERENCE = 1e-5
CHECK_STEPS = 4


class Digits(NamedTuple):
    """The digits, split: images of shape `(n, 8, 8, 1)` with pixels from -1 to 1, labels of shape `(n,)`."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load_digits() -> Digits:
    images, labels = sklearn.datasets.load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 8 - 1).astype("float32")
    train_images, test_images, train_labels, test_labels = sklearn.model_selection.train_test_split(
        images, labels.astype("int32"), test_size=357, stratify=labels, random_state=0
    )
    return Digits(train_images, train_labels, test_images, test_labels)


class Genotype(NamedTuple):
    """What is inside a cell.

    States 0 and 1 are the cell's two inputs. Each entry of `sums`, in order, makes the next state: it names two
    operations, each with the state it is applied to, and the new state is the sum of the two results. The cell's
    output joins the states in `joined` along the channels.
    """

    sums: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    joined: tuple[int, ...]


NORMAL = Genotype(
    sums=(
        (("1x1", 1), ("max_3x3", 1)),
        (("none", 1), ("1x3_3x1", 0)),
        (("1x1", 0), ("1x3_3x1", 0)),
        (("max_3x3", 2), ("none", 2)),
        (("average_3x3", 1), ("1x1", 5)),
    ),
    joined=(0, 3, 4, 6),
)
REDUCTION = Genotype(
    sums=(
        (("max_2x2", 0), ("max_3x3", 0)),
        (("none", 2), ("3x3", 1)),
        (("1x3_3x1", 2), ("max_3x3", 2)),
        (("none", 3), ("max_2x2", 1)),
        (("average_3x3", 2), ("1x1", 3)),
    ),
    joined=(4, 5, 6),
)


def convolution(filters: int, size: int | tuple[int, int] = 1, strides: int | tuple[int, int] = 1) -> list[keras.Layer]:
    """ReLU, convolution without bias, batch norm: the order that AmoebaNet uses everywhere."""
    return [
        keras.layers.ReLU(),
        keras.layers.Conv2D(filters, size, strides, padding="same", use_bias=False, kernel_initializer="he_normal"),
        keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5),
    ]


def operation(name: str, filters: int, stride: int) -> list[keras.Layer]:
    """The layers of an operation that a genotype names, for a state that has `filters` channels."""
    if name == "none":
        return [keras.layers.Identity()]
    if name == "max_2x2":
        return [keras.layers.MaxPooling2D(2, stride, padding="same")]
    if name == "max_3x3":
        return [keras.layers.MaxPooling2D(3, stride, padding="same")]
    if name == "average_3x3":
        return [keras.layers.AveragePooling2D(3, stride, padding="same")]
    if name == "1x1":
        return convolution(filters, 1, stride)
    if name == "3x3":
        return convolution(filters, 3, stride)
    if name == "1x3_3x1":
        return convolution(filters, (1, 3), (1, stride)) + convolution(filters, (3, 1), (stride, 1))
    raise ValueError(f"Expected the name of an operation. Received: {name!r}.")


@keras.saving.register_keras_serializable("digits_amoebanet")
class FactorisedReduction(keras.layers.Layer):
    """Halves height and width, yet looks at both diagonals: half of the filters see even positions, half see odd ones."""

    def __init__(self, filters: int, **kwargs) -> None:
        super().__init__(**kwargs)
        self.filters = filters
        self.even = keras.layers.Conv2D(filters // 2, 1, strides=2, use_bias=False)
        self.odd = keras.layers.Conv2D(filters // 2, 1, strides=2, use_bias=False)
        self.norm = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)

    def build(self, input_shape) -> None:
        """Builds the two convolutions and the batch norm."""
        self.even.build(input_shape)
        self.odd.build(input_shape)
        self.norm.build(self.compute_output_shape(input_shape))

    def call(self, inputs, training=None):
        """Returns a tensor of half the height and width."""
        inputs = keras.ops.relu(inputs)
        halves = [self.even(inputs), self.odd(inputs[:, 1:, 1:])]
        return self.norm(keras.ops.concatenate(halves), training=training)

    def compute_output_shape(self, input_shape) -> tuple:
        """Returns the shape of what `call` returns."""
        rows, height, width, _ = input_shape
        return (rows, height // 2, width // 2, self.filters)

    def get_config(self) -> dict:
        """Returns the arguments of `__init__`."""
        return {**super().get_config(), "filters": self.filters}


@keras.saving.register_keras_serializable("digits_amoebanet")
class Cell(keras.layers.Layer):
    """An AmoebaNet-D cell: takes the pair (current, previous) and returns the pair (output, current).

    Args:
        filters: channels of each state in the cell; the output has 4 times as many, that of a reduction cell 3 times.
        reduction: whether this is a reduction cell, which halves height and width.
    """

    def __init__(self, filters: int, reduction: bool = False, **kwargs) -> None:
        super().__init__(**kwargs)
        self.filters = filters
        self.reduction = reduction
        self.genotype = REDUCTION if reduction else NORMAL

    def build(self, input_shape) -> None:
        """Builds what brings both inputs to one shape, and the two operations of every sum."""
        current, previous = input_shape
        self.adapt_current = keras.Sequential(convolution(self.filters))
        if current[1] == previous[1]:
            self.adapt_previous = keras.Sequential(convolution(self.filters))
        else:  # a reduction cell lies between the two
            self.adapt_previous = FactorisedReduction(self.filters)
        self.adapt_current.build(current)
        self.adapt_previous.build(previous)

        shapes = [(*current[:3], self.filters)] * 2
        self.operations = []
        for pair in self.genotype.sums:
            for name, state in pair:
                stride = 2 if self.reduction and state < 2 else 1
                self.operations.append(keras.Sequential(operation(name, self.filters, stride)))
                self.operations[-1].build(shapes[state])
            shapes.append(self.operations[-1].output_shape)

    def call(self, inputs, training=None):
        """Returns the cell's output and, unchanged, its first input: the next cell's pair."""
        current, previous = inputs
        states = [self.adapt_current(current, training=training), self.adapt_previous(previous, training=training)]
        operations = iter(self.operations)
        for pair in self.genotype.sums:
            left, right = (next(operations)(states[state], training=training) for _, state in pair)
            states.append(left + right)
        return keras.ops.concatenate([states[state] for state in self.genotype.joined]), current

    def compute_output_shape(self, input_shape) -> tuple[tuple, tuple]:
        """Returns the shapes of the pair that `call` returns."""
        current, _ = input_shape
        rows, height, width, _ = current
        shrink = 2 if self.reduction else 1
        return (rows, height // shrink, width // shrink, self.filters * len(self.genotype.joined)), tuple(current)

    def get_config(self) -> dict:
        """Returns the arguments of `__init__`."""
        return {**super().get_config(), "filters": self.filters, "reduction": self.reduction}


def build_model(seed: int) -> keras.Model:
    """AmoebaNet-D: a stem, normal cells with a reduction cell before the second and the last third, a classifier."""
    keras.utils.set_random_seed(seed)
    images = keras.Input((8, 8, 1))
    stem = keras.layers.Conv2D(2 * FILTERS, 3, padding="same", use_bias=False, name="stem_convolution")(images)
    stem = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name="stem_norm")(stem)

    pair, filters = (stem, stem), FILTERS
    for i in range(NORMAL_CELLS):
        if i in (NORMAL_CELLS // 3, 2 * NORMAL_CELLS // 3):
            filters *= 2
            pair = Cell(filters, reduction=True, name=f"reduction_before_{i}")(pair)
        pair = Cell(filters, name=f"normal_{i}")(pair)

    features = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(pair[0]))
    features = keras.layers.Dropout(0.3, seed=seed)(features)
    return keras.Model(images, keras.layers.Dense(10, name="classifier")(features))


def train(strategy: tf_gpipe.GPipeStrategy, digits: Digits, epochs: int, batch_size: int, seed: int) -> float:
    """Trains the network in the pipeline and returns its accuracy on the test images."""
    steps = epochs * -(-len(digits.train_images) // batch_size)
    with strategy.scope():
        model = build_model(seed)
        model.compile(
            keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(5e-3, steps)),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    print(strategy.plan(model))
    history = model.fit(
        digits.train_images,
        digits.train_labels,
        batch_size,
        epochs,
        validation_data=(digits.test_images, digits.test_labels),
        validation_batch_size=119,  # a third of the test images
    )
    return history.history["val_accuracy"][-1]


def weights_after(strategy: tf_gpipe.GPipeStrategy, digits: Digits, batch_size: int, seed: int) -> list[np.ndarray]:
    """Trains for a few steps, on the same images in the same order each time, and returns every weight."""
    with strategy.scope():
        model = build_model(seed)
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = CHECK_STEPS * batch_size
    model.fit(digits.train_images[:rows], digits.train_labels[:rows], batch_size, shuffle=False, verbose=0)
    return model.get_weights()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains an AmoebaNet-D on digits, in a pipeline on logical CPUs.")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=144)
    parser.add_argument("--remat", choices=["always", "except_last", "never"], default="except_last")
    parser.add_argument("--quick", action="store_true", help="one epoch on 256 images, whatever the accuracy")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.epochs, arguments.batch_size = 1, 64
    return arguments


def main() -> int:
    arguments = parse_arguments()
    devices = tf_gpipe.set_logical_cpus(arguments.stages)  # before TensorFlow starts
    digits = load_digits()
    if arguments.quick:
        digits = digits._replace(train_images=digits.train_images[:256], train_labels=digits.train_labels[:256])

    def pipeline(num_stages: int) -> tf_gpipe.GPipeStrategy:
        return tf_gpipe.GPipeStrategy(
            num_stages, arguments.micro_batches, devices=devices[:num_stages], remat=arguments.remat
        )

    accuracy = train(pipeline(arguments.stages), digits, arguments.epochs, arguments.batch_size, arguments.seed)
    print(f"test accuracy {accuracy:.1%}".replace("%", " %"))

    many, one = (
        weights_after(pipeline(num_stages), digits, arguments.batch_size, arguments.seed)
        for num_stages in (arguments.stages, 1)
    )
    difference = max(float(np.max(np.abs(a - b))) for a, b in zip(many, one, strict=True))
    print(f"{arguments.stages} stages and 1 stage: largest difference of any weight {difference:.1e}")

    inaccurate = accuracy < LEAST_ACCURACY and not arguments.quick
    return int(inaccurate or not difference <= LARGEST_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
