"""AmoebaNet as a Keras model: a chain of cells that pass pairs of tensors.

A cell takes the outputs of the two cells before it, (current, previous), and gives (output, current). Each cell is one
layer, so a pipeline can be cut between any two of them, where two tensors cross.

    stem ─ stem_cell_0 ─ stem_cell_1 ─ L/3 cells ─ reduction_0 ─ L/3 cells ─ reduction_1 ─ L/3 cells ─ classifier

Two layouts are known. "tf" is that of TensorFlow's public TPU model, which trained the published networks: stem of 32
filters, stem cells of D/4 and D/2, dropout, auxiliary head. "torch" is that of torchgpipe, whose numbers of parameters
are published: stem of D/4 filters, stem cells of D/2 and D, no dropout, no auxiliary head. (Its average pooling where
the genotype says max pooling is not copied.) In both, the three stacks of cells have D, 2 D and 4 D filters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import keras

from amoebanet.genotypes import GENOTYPES

SEPARABLE = {"separable_3x3": 3, "separable_5x5": 5, "separable_7x7": 7}
MAX_POOLS = {"max_2x2": 2, "max_3x3": 3}
Shape = tuple[int | None, ...]


class Block(keras.layers.Layer):
    """What all layers of the network have in common: how they convolve and normalise.

    Args:
        weight_decay: factor of half the sum of squares of convolution and classifier weights that is added to the loss.
        momentum: of the moving averages of batch norms.
        epsilon: of batch norms.

    Attributes:
        kept_elements: elements of one row that the outputs of convolutions, norms and pools have together: about what
            the backward pass needs.
    """

    def __init__(self, *, weight_decay: float = 4e-5, momentum: float = 0.9, epsilon: float = 1e-5, **kwargs) -> None:
        super().__init__(**kwargs)
        self.weight_decay = weight_decay
        self.momentum = momentum
        self.epsilon = epsilon
        self.parts: list[list[keras.Layer]] = []  # made by `build`, in the order in which they run
        self.kept_elements = 0

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of `__init__`."""
        options = {"weight_decay": self.weight_decay, "momentum": self.momentum, "epsilon": self.epsilon}
        return {**super().get_config(), **options}

    def add_part(self, layers: list[keras.Layer], shape: Shape) -> Shape:
        """Builds layers that follow one another, or none; returns the shape that they make of a shape."""
        for layer in layers:
            layer.build(shape)
            shape = layer.compute_output_shape(shape)
            if not isinstance(layer, keras.layers.ReLU):
                self.kept_elements += math.prod(shape[1:])
        self.parts.append(layers)
        return shape

    def run_part(self, index: int, x, training: bool | None):
        """Runs the layers of a part."""
        for layer in self.parts[index]:
            x = layer(x, training=training)
        return x

    def weights_of(self, *names: str) -> dict[str, Any]:
        """Initialisers and regularisers for a layer's weights of these names: He normal by fan-out, and L2."""
        options: dict[str, Any] = {}
        for name in names:
            options[f"{name}_initializer"] = keras.initializers.VarianceScaling(2.0, "fan_out", "truncated_normal")
            options[f"{name}_regularizer"] = keras.regularizers.L2(self.weight_decay / 2) if self.weight_decay else None
        return options

    def norm(self) -> keras.Layer:
        """A batch norm."""
        return keras.layers.BatchNormalization(momentum=self.momentum, epsilon=self.epsilon, dtype=self.dtype_policy)

    def activation(self) -> keras.Layer:
        """A ReLU."""
        return keras.layers.ReLU(dtype=self.dtype_policy)

    def linear_convolution(
        self,
        filters: int,
        size: int | tuple[int, int] = 1,
        strides: int | tuple[int, int] = 1,
        padding: str = "same",
    ) -> keras.Layer:
        """A convolution without bias."""
        options = {"padding": padding, "use_bias": False, "dtype": self.dtype_policy, **self.weights_of("kernel")}
        return keras.layers.Conv2D(filters, size, strides, **options)

    def convolution(
        self, filters: int, size: int | tuple[int, int] = 1, strides: int | tuple[int, int] = 1
    ) -> list[keras.Layer]:
        """ReLU, convolution, batch norm: the order inside every operation."""
        return [self.activation(), self.linear_convolution(filters, size, strides), self.norm()]

    def separable_convolution(self, filters: int, size: int, strides: int) -> list[keras.Layer]:
        """Twice ReLU, separable convolution, batch norm; only the first has strides."""
        options = {"padding": "same", "use_bias": False, "dtype": self.dtype_policy}
        layers = []
        for stride in (strides, 1):
            weights = self.weights_of("depthwise", "pointwise")
            layers += [self.activation(), keras.layers.SeparableConv2D(filters, size, stride, **options, **weights)]
            layers += [self.norm()]
        return layers


@keras.saving.register_keras_serializable("amoebanet")
class FactorizedReduction(Block):
    """Halves height and width: joins 1x1 convolutions of the pixels at even and at odd places, then normalises."""

    def __init__(self, filters: int, **kwargs) -> None:
        super().__init__(**kwargs)
        if filters % 2:
            raise ValueError(
                f"Expected an even number of filters, since half are for even pixels. Received: {filters}. Choose the "
                "network's `filters` so that half of them is even."
            )
        self.filters = filters

    def build(self, input_shape: Shape) -> None:
        """Builds the two convolutions and the norm."""
        self.even = self.linear_convolution(self.filters // 2, strides=2)
        self.odd = self.linear_convolution(self.filters // 2, strides=2)
        self.joined_norm = self.norm()
        self.even.build(input_shape)
        self.odd.build(input_shape)
        self.joined_norm.build(self.compute_output_shape(input_shape))

    def call(self, x, training=None):
        """Returns the joined halves."""
        shifted = keras.ops.pad(x[:, 1:, 1:], [[0, 0], [0, 1], [0, 1], [0, 0]])
        return self.joined_norm(keras.ops.concatenate([self.even(x), self.odd(shifted)], axis=-1), training=training)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the halved shape."""
        return (input_shape[0], *[math.ceil(length / 2) for length in input_shape[1:3]], self.filters)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of `__init__`."""
        return {**super().get_config(), "filters": self.filters}


@keras.saving.register_keras_serializable("amoebanet")
class Stem(Block):
    """The first layer: a 3x3 convolution of stride 2 and a batch norm.

    Args:
        filters: channels of its output.
        torch: whether it is padded by one pixel all around and has a ReLU in front, on the image, as in torchgpipe.
    """

    def __init__(self, filters: int, torch: bool = False, **kwargs) -> None:
        super().__init__(**kwargs)
        self.filters = filters
        self.torch = torch

    def build(self, input_shape: Shape) -> None:
        """Builds the layers."""
        padding = [self.activation(), keras.layers.ZeroPadding2D(1, dtype=self.dtype_policy)] if self.torch else []
        convolution = self.linear_convolution(self.filters, 3, 2, padding="valid")
        self.add_part([*padding, convolution, self.norm()], input_shape)

    def call(self, images, training=None):
        """Returns the features."""
        return self.run_part(0, images, training)

    def compute_output_shape(self, input_shape: Shape) -> Shape:
        """Returns the shape of the features."""
        margin = 1 if self.torch else -1
        return (input_shape[0], *[(length + margin) // 2 for length in input_shape[1:3]], self.filters)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of `__init__`."""
        return {**super().get_config(), "filters": self.filters, "torch": self.torch}


@keras.saving.register_keras_serializable("amoebanet")
class Cell(Block):
    """An AmoebaNet cell: takes the pair (current, previous) and returns the pair (output, current).

    Args:
        genotype: "A", "B" or "D".
        filters: channels of each state in the cell.
        reduction: whether this is a reduction cell, which halves height and width.
        adapt_previous: whether the previous input is brought to the size and channels of the states; the first cell of
            the "tf" layout takes it as it is.
        drop_path: whether paths are dropped in training. The probability to keep one is the weight `keep`, at first 1;
            `training.ScheduledDropPath` lowers it.
    """

    def __init__(
        self,
        genotype: str,
        filters: int,
        reduction: bool = False,
        adapt_previous: bool = True,
        drop_path: bool = False,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.genotype = genotype
        self.filters = filters
        self.reduction = reduction
        self.adapt_previous = adapt_previous
        self.drop_path = drop_path
        self.design = GENOTYPES[genotype].reduction if reduction else GENOTYPES[genotype].normal

    def build(self, input_shape: tuple[Shape, Shape]) -> None:
        """Builds what brings both inputs to one shape, and the two operations of every sum."""
        current, previous = input_shape
        shapes = [self.add_part(self.convolution(self.filters), current)]
        shapes += [self.add_part(self.previous_adapter(current, previous), previous)]
        for pair in self.design.sums:
            for name, state in pair:
                stride = 2 if self.reduction and state < 2 else 1
                made = self.add_part(self.operation(name, shapes[state][-1], stride), shapes[state])
            shapes.append(made)
        if self.drop_path:
            self.keep = self.add_weight((), "ones", dtype="float32", trainable=False, autocast=False, name="keep")
            self.seed_generator = keras.random.SeedGenerator()

    def previous_adapter(self, current: Shape, previous: Shape) -> list[keras.Layer]:
        """The layers that bring the previous input to the size of the current one, and to `filters` channels."""
        if not self.adapt_previous:
            return []
        if previous[1:3] != current[1:3]:
            options = {"weight_decay": self.weight_decay, "momentum": self.momentum, "epsilon": self.epsilon}
            return [self.activation(), FactorizedReduction(self.filters, **options, dtype=self.dtype_policy)]
        return self.convolution(self.filters) if previous[-1] != self.filters else []

    def operation(self, name: str, channels: int, stride: int) -> list[keras.Layer]:
        """The layers of an operation that the genotype names, for a state with so many channels."""
        if name == "none":
            return [] if stride == 1 and channels == self.filters else self.convolution(self.filters, 1, stride)
        if name == "1x1":
            return self.convolution(self.filters, 1, stride)
        if name == "3x3":
            return self.bottleneck((3, stride))
        if name == "1x7_7x1":
            return self.bottleneck(((1, 7), (1, stride)), ((7, 1), (stride, 1)))
        if name in SEPARABLE:
            return self.separable_convolution(self.filters, SEPARABLE[name], stride)
        options = {"padding": "same", "dtype": self.dtype_policy}
        if name in MAX_POOLS:
            pool = keras.layers.MaxPooling2D(MAX_POOLS[name], stride, **options)
        else:
            pool = keras.layers.AveragePooling2D(3, stride, **options)
        return [pool] if channels == self.filters else [pool, self.linear_convolution(self.filters), self.norm()]

    def bottleneck(self, *kernels: tuple[Any, Any]) -> list[keras.Layer]:
        """Convolutions of these sizes and strides at a quarter of the filters, between two 1x1 convolutions."""
        width = self.filters // 4
        middle: list[keras.Layer] = []
        for size, strides in kernels:
            middle += self.convolution(width or self.filters, size, strides)
        return [*self.convolution(width), *middle, *self.convolution(self.filters)] if width else middle

    def call(self, inputs, training=None):
        """Returns the cell's output and, unchanged, its first input: the next cell's pair."""
        current, previous = inputs
        states = [self.run_part(0, current, training), self.run_part(1, previous, training)]
        indices = itertools.count(2)
        masks = self.masks(current) if self.drop_path and training else itertools.repeat(None)
        for pair in self.design.sums:
            made = []
            for name, state in pair:
                result = self.run_part(next(indices), states[state], training)
                mask = None if name == "none" else next(masks)
                made.append(result if mask is None else result * mask)
            states.append(made[0] + made[1])
        return keras.ops.concatenate([states[state] for state in self.design.joined], axis=-1), current

    def masks(self, current) -> Iterator[Any]:
        """For each operation in turn, what its result is multiplied by in each row: 0, or 1 / keep."""
        count = sum(name != "none" for pair in self.design.sums for name, _ in pair)
        shape = (count, keras.ops.shape(current)[0], 1, 1, 1)
        draws = keras.random.uniform(shape, dtype="float32", seed=self.seed_generator)
        masks = keras.ops.cast(keras.ops.floor(draws + self.keep) / self.keep, self.compute_dtype)
        return iter(keras.ops.unstack(masks, count))

    def compute_output_shape(self, input_shape: tuple[Shape, Shape]) -> tuple[Shape, Shape]:
        """Returns the shapes of the pair that `call` returns."""
        current, _ = input_shape
        size = [math.ceil(length / 2) if self.reduction else length for length in current[1:3]]
        return (current[0], *size, self.filters * len(self.design.joined)), tuple(current)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of `__init__`."""
        names = ("genotype", "filters", "reduction", "adapt_previous", "drop_path")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


@keras.saving.register_keras_serializable("amoebanet")
class AuxiliaryHead(Block):
    """A small classifier in the middle of the network: takes the pair of a cell and returns it, and logits.

    It hands the pair on, so that in a pipeline it stands where its cell stands, and only its logits go further.

    Args:
        num_classes: the number of logits.
        scale: its convolutions have 128 and 768 times as many filters.
    """

    def __init__(self, num_classes: int, scale: float = 0.4, **kwargs) -> None:
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.scale = scale

    def build(self, input_shape: tuple[Shape, Shape]) -> None:
        """Builds the layers for the size of the current input."""
        current, _ = input_shape
        size = tuple((length - 5) // 3 + 1 for length in current[1:3])
        if min(size) < 1:
            raise ValueError(
                f"Expected features of at least 5x5 for the auxiliary head. Received: {current[1]}x{current[2]}. Take "
                "images of at least 67 pixels, or leave the head out."
            )
        layers = [self.activation(), keras.layers.AveragePooling2D(5, 3, dtype=self.dtype_policy)]
        layers += [self.linear_convolution(int(128 * self.scale)), self.norm(), self.activation()]
        layers += [self.linear_convolution(int(768 * self.scale), size, padding="valid"), self.norm()]
        layers += [self.activation(), keras.layers.Flatten(dtype=self.dtype_policy)]
        layers += [keras.layers.Dense(self.num_classes, dtype=self.variable_dtype, **self.weights_of("kernel"))]
        self.add_part(layers, current)

    def call(self, inputs, training=None):
        """Returns both inputs, unchanged, and the logits."""
        current, previous = inputs
        return current, previous, self.run_part(0, current, training)

    def compute_output_spec(self, inputs, training=None) -> tuple[keras.KerasTensor, ...]:
        """Returns shapes and dtypes; the logits have the precision of weights."""
        current, previous = (keras.KerasTensor(x.shape, x.dtype) for x in inputs)
        return current, previous, keras.KerasTensor((current.shape[0], self.num_classes), self.variable_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of `__init__`."""
        return {**super().get_config(), "num_classes": self.num_classes, "scale": self.scale}


@keras.saving.register_keras_serializable("amoebanet")
class Classifier(Block):
    """The last layer: ReLU, average over the image, dropout, logits in the precision of weights.

    Args:
        num_classes: the number of logits.
        dropout: the probability to drop a feature in training.
        relu: whether there is a ReLU.
    """

    def __init__(self, num_classes: int, dropout: float = 0.5, relu: bool = True, **kwargs) -> None:
        super().__init__(**kwargs)
        self.num_classes = num_classes
        self.dropout = dropout
        self.relu = relu

    def build(self, input_shape: Shape) -> None:
        """Builds the layers."""
        layers = [self.activation()] if self.relu else []
        layers += [keras.layers.GlobalAveragePooling2D(dtype=self.dtype_policy)]
        layers += [keras.layers.Dropout(self.dropout, dtype=self.dtype_policy)]
        layers += [keras.layers.Dense(self.num_classes, dtype=self.variable_dtype, **self.weights_of("kernel"))]
        self.add_part(layers, input_shape)

    def call(self, features, training=None):
        """Returns the logits."""
        return self.run_part(0, features, training)

    def compute_output_spec(self, features, training=None) -> keras.KerasTensor:
        """Returns shape and dtype of the logits."""
        return keras.KerasTensor((features.shape[0], self.num_classes), self.variable_dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of `__init__`."""
        options = {"num_classes": self.num_classes, "dropout": self.dropout, "relu": self.relu}
        return {**super().get_config(), **options}


def amoebanet(
    genotype: str = "D",
    num_cells: int = 18,
    filters: int = 256,
    image_size: int = 224,
    num_classes: int = 1000,
    *,
    layout: str = "tf",
    auxiliary_head: bool = False,
    dropout: float = 0.5,
    drop_path: bool = False,
    **options: float,
) -> keras.Model:
    """AmoebaNet(L, D).

    Args:
        genotype: "A", "B" or "D".
        num_cells: L, the number of normal cells, a multiple of 3; two reduction cells come between them.
        filters: D, the filters of the first third of the cells, a multiple of 4.
        image_size: height and width of the images, whose pixels are from -1 to 1.
        num_classes: the number of logits.
        layout: "tf" or "torch".
        auxiliary_head: whether the last cell of the second third has a classifier of its own.
        dropout: the probability to drop a feature before the classifier; not in the "torch" layout.
        drop_path: whether the cells can drop paths.
        options: `weight_decay`, `momentum` and `epsilon` of `Block`.

    Returns:
        A model whose outputs are {"logits": ...}, and {"auxiliary": ...} where there is an auxiliary head.

    Raises:
        ValueError: an argument has a value that is not described above.
    """
    if genotype not in GENOTYPES or layout not in ("tf", "torch"):
        raise ValueError(
            f"Expected genotype A, B or D and layout tf or torch. Received: genotype={genotype!r}, layout={layout!r}."
        )
    if num_cells < 3 or num_cells % 3 or filters < 4 or filters % 4:
        raise ValueError(
            "Expected a number of cells that is a multiple of 3, and filters that are a multiple of 4. Received: "
            f"num_cells={num_cells}, filters={filters}."
        )
    torch = layout == "torch"
    images = keras.Input((image_size, image_size, 3), name="images")
    outputs = {}

    stem = Stem(filters // 4 if torch else 32, torch, name="stem", **options)(images)
    pair = (stem, stem)
    for i in range(2):
        width = filters // (2, 1)[i] if torch else filters // (4, 2)[i]
        adapt = torch or i > 0
        pair = Cell(genotype, width, True, adapt, drop_path, name=f"stem_cell_{i}", **options)(pair)
    for i in range(num_cells):
        stack, place = divmod(i, num_cells // 3)
        if stack and not place:
            filters *= 2
            pair = Cell(genotype, filters, True, True, drop_path, name=f"reduction_{stack - 1}", **options)(pair)
        pair = Cell(genotype, filters, False, True, drop_path, name=f"cell_{i}", **options)(pair)
        if auxiliary_head and i == 2 * num_cells // 3 - 1:
            *pair, outputs["auxiliary"] = AuxiliaryHead(num_classes, name="auxiliary_head", **options)(pair)
    rate = 0.0 if torch else dropout
    outputs["logits"] = Classifier(num_classes, rate, not torch, name="classifier", **options)(pair[0])
    return keras.Model(images, outputs, name=f"amoebanet_{genotype.lower()}")


def most_stages(num_cells: int, auxiliary_head: bool) -> int:
    """The number of layers of `amoebanet`: stem, stem cells, cells, reductions, classifiers. Each stage needs one."""
    return 1 + 2 + num_cells + 2 + 1 + auxiliary_head
