"""Schemes of training with several models, losses or gradients in one step: as in plain Keras, at every stage count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, largest_difference, normal, scope_of, train, use_floats
from keras import layers, ops, tree

import tf_gpipe

ROWS = 10  # Of which 3 micro-batches get 4, 3 and 3.
X, Y = normal(ROWS, 6, seed=1), normal(ROWS, 2, seed=2)
LABELS = np.arange(ROWS) % 3

Step = Callable[[], Any]


def mlp(inputs: int = 6, outputs: int = 2, name: str = "mlp", **last: Any) -> keras.Model:
    """Three dense layers, one for each of three stages."""
    x = keras.Input([inputs])
    y = layers.Dense(8, "tanh", name="one")(x)
    y = layers.Dense(8, "tanh", name="two")(y)
    return keras.Model(x, layers.Dense(outputs, name="three", **last)(y), name=name)


@pytest.fixture
def float64() -> Iterator[None]:
    """For numbers in which the rounding of float32 grows beyond the tolerance: second derivatives, times ten."""
    use_floats("float64")
    yield
    use_floats("float32")


def sgd(rate: float = 0.1) -> keras.Optimizer:
    return keras.optimizers.SGD(rate)


def apply(tape: tf.GradientTape, loss: Any, model: keras.Model, optimizer: keras.Optimizer) -> None:
    """One step of an optimizer on a model's weights."""
    weights = model.trainable_weights
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


def stages_in(graph: tf.Graph) -> set[tuple[int, str]]:
    """(stage, kind) of the tasks of a graph."""
    parts = [operation.name.split("/") for operation in graph.get_operations()]
    at = [(names, i) for names in parts for i, name in enumerate(names[:-2]) if name.startswith("stage_")]
    return {(int(names[i].removeprefix("stage_")), names[i + 2]) for names, i in at}


def devices_of(model: keras.Model) -> set[str]:
    return {w.value.device for w in model.weights}


def check_loop(
    make: Callable[[], tuple[list[keras.Model], Step]],
    *,
    steps: int = 3,
    num_stages: int = 3,
    num_micro_batches: int = 3,
    still: tuple[int, ...] = (),
) -> tuple[list[keras.Model], list[keras.Model], list[Any]]:
    """Runs the step that `make` returns with its models, plainly and under the strategy; all must be equal.

    Args:
        make: called in the strategy's scope; the step is run by `strategy.run` in a `tf.function`.
        steps: how many.
        num_stages, num_micro_batches: of the strategy.
        still: which models are not to be trained.

    Returns:
        The models of both ways, and what the plain steps gave.
    """
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(num_stages, num_micro_batches)):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            models, step = make()
        before = [model.get_weights() for model in models]
        for model in models if strategy is not None else []:
            strategy.place(model)
        function = tf.function(lambda strategy=strategy, step=step: strategy.run(step) if strategy else step())
        given = [np.asarray(part) for _ in range(steps) for part in tree.flatten(function())]
        found.append((models, given))
        for k, (model, old) in enumerate(zip(models, before, strict=True)):
            pairs = zip(old, model.get_weights(), strict=True)
            assert any(np.any(a != b) for a, b in pairs) == (k not in still), model.name
        if strategy is not None:
            tasks = stages_in(function.get_concrete_function().graph)
            assert tasks >= {(k, kind) for k in range(num_stages) for kind in ("forward", "backward")}
            assert all(len(devices_of(model)) == num_stages for model in models)
    (plain, wanted), (piped, received) = found
    for a, b in zip(wanted, received, strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-6, atol=1e-6)
    for a, b in zip(plain, piped, strict=True):
        assert largest_difference(a, b) <= 1e-6, a.name
    return plain, piped, wanted


def check_fit(
    make: Callable[[], keras.Model],
    data: tuple[Any, ...] = (X, Y),
    num_stages: int = 3,
    num_micro_batches: int = 3,
    partition: Any = "flops",
    **arguments: Any,
) -> tuple[keras.Model, keras.Model]:
    """Fits plainly and under the strategy; all must be equal. Returns both models."""
    keras.utils.set_random_seed(0)
    before = make().get_weights()
    plain = train(make, data, batch_size=4, **arguments)
    strategy = tf_gpipe.GPipeStrategy(num_stages, num_micro_batches, partition=partition)
    piped = train(make, data, strategy, batch_size=4, **arguments)
    assert_same(plain, piped)
    assert any(np.any(a != b) for a, b in zip(before, plain[0].get_weights(), strict=True))
    (pipeline, *_) = vars(piped[0])["_gpipe_pipelines"][strategy].values()
    assert [stage.device for stage in pipeline.plan.stages] == strategy.devices
    assert len(devices_of(piped[0])) >= num_stages - 1  # a stage may have no weights
    return plain[0], piped[0]


# --- adversaries ---


class GAN(keras.Model):
    """Trains a discriminator and a generator in one step."""

    def __init__(self, generator: keras.Model, discriminator: keras.Model) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def compile(self) -> None:
        super().compile()
        self.g_optimizer, self.d_optimizer = sgd(0.1), sgd(0.05)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def penalty(self, real: Any, fake: Any) -> Any:
        """What is added to the discriminator's loss."""
        return 0.0

    def train_step(self, data: Any) -> dict[str, Any]:
        noise, real = data
        with tf.GradientTape() as tape:
            fake = self.generator(noise, training=True)
            right, wrong = (self.discriminator(part, training=True) for part in (real, fake))
            d_loss = self.loss_fn(ops.ones_like(right), right) + self.loss_fn(ops.zeros_like(wrong), wrong)
            d_loss = d_loss + self.penalty(real, fake)
        apply(tape, d_loss, self.discriminator, self.d_optimizer)
        with tf.GradientTape() as tape:
            logits = self.discriminator(self.generator(noise, training=True), training=True)
            g_loss = self.loss_fn(ops.ones_like(logits), logits)
        apply(tape, g_loss, self.generator, self.g_optimizer)
        return {"d": d_loss, "g": g_loss}


class PenalisedGAN(GAN):
    """Holds the size of the discriminator's slope at 1 (WGAN-GP): a tape inside a tape."""

    def penalty(self, real: Any, fake: Any) -> Any:
        middle = 0.5 * (real + fake)
        with tf.GradientTape() as tape:
            tape.watch(middle)
            logits = self.discriminator(middle, training=True)
        slope = tape.gradient(logits, middle)
        return 10.0 * ops.mean(ops.square(ops.sqrt(ops.sum(ops.square(slope), axis=1) + 1e-6) - 1.0))


def fitted_gan(
    strategy: tf_gpipe.GPipeStrategy | None, kind: type[GAN] = GAN, *, plain_discriminator: bool = False
) -> tuple[GAN, dict[str, list[float]]]:
    keras.utils.set_random_seed(0)
    with scope_of(None if plain_discriminator else strategy):
        discriminator = mlp(2, 1, "discriminator")
    with scope_of(strategy):
        gan = kind(mlp(4, 2, "generator"), discriminator)
        gan.compile()
    before = gan.generator.get_weights(), gan.discriminator.get_weights()
    history = gan.fit(normal(ROWS, 4), Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    for old, model in zip(before, (gan.generator, gan.discriminator), strict=True):
        assert all(np.any(a != b) for a, b in zip(old, model.get_weights(), strict=True))
    return gan, history


@pytest.mark.parametrize("plain_discriminator", [False, True])
def test_a_generator_and_a_discriminator(plain_discriminator: bool) -> None:
    plain = fitted_gan(None)
    piped = fitted_gan(tf_gpipe.GPipeStrategy(3, 3), plain_discriminator=plain_discriminator)
    assert_same(plain, piped)
    assert len(devices_of(piped[0].generator)) == 3
    assert len(devices_of(piped[0].discriminator)) == (1 if plain_discriminator else 3)


def test_a_discriminator_that_is_compiled_by_itself_and_inside_a_combined_model() -> None:
    noise, ones = normal(ROWS, 4), np.ones([ROWS, 1], "float32")
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(3, 3)):
        keras.utils.set_random_seed(0)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        with scope_of(strategy):
            generator, discriminator = mlp(4, 2, "generator"), mlp(2, 1, "discriminator")
            discriminator.compile(sgd(), loss)
            discriminator.trainable = False
            x = keras.Input([4])
            combined = keras.Model(x, discriminator(generator(x)))
            combined.compile(sgd(), loss)
        before = combined.get_weights()
        numbers = []
        for _ in range(3):
            fake = generator.predict_on_batch(noise)
            discriminator.trainable = True
            numbers.append(
                float(discriminator.train_on_batch(np.concatenate([Y, fake]), np.concatenate([ones, 0.0 * ones])))
            )
            discriminator.trainable = False
            numbers.append(float(combined.train_on_batch(noise, ones)))
        assert all(np.any(a != b) for a, b in zip(before, combined.get_weights(), strict=True))
        found.append((combined, numbers))
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-6)
    assert largest_difference(found[0][0], found[1][0]) <= 1e-6
    assert len(devices_of(found[1][0])) == 3


@pytest.mark.parametrize(
    ("stages", "micro_batches", "remat"),
    [(3, 3, "except_last"), (3, 3, "always"), (3, 1, "never"), (1, 3, "except_last"), (1, 1, "except_last")],
)
@pytest.mark.usefixtures("float64")
def test_a_gradient_penalty(stages: int, micro_batches: int, remat: str) -> None:
    plain = fitted_gan(None, PenalisedGAN)
    piped = fitted_gan(tf_gpipe.GPipeStrategy(stages, micro_batches, remat=remat), PenalisedGAN)
    assert_same(plain, piped, 1e-10)
    assert len(devices_of(piped[0].discriminator)) == stages


@pytest.mark.usefixtures("float64")
def test_a_gradient_penalty_on_a_discriminator_that_is_plain() -> None:
    plain = fitted_gan(None, PenalisedGAN)
    piped = fitted_gan(tf_gpipe.GPipeStrategy(3, 3), PenalisedGAN, plain_discriminator=True)
    assert_same(plain, piped, 1e-10)
    assert abs(plain[1]["d"][0] - fitted_gan(None)[1]["d"][0]) > 0.1  # the penalty counts
    assert len(devices_of(piped[0].generator)) == 3


def test_training_on_adversarial_rows() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        model, optimizer = mlp(6, 3), sgd()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

        def step() -> Any:
            x = tf.constant(X)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = loss_fn(LABELS, model(x, training=True))
            slope = tape.gradient(loss, x)
            with tf.GradientTape() as tape:
                harder = loss_fn(LABELS, model(x + 0.1 * ops.sign(slope), training=True))
                total = harder + loss_fn(LABELS, model(x, training=True))
            apply(tape, total, model, optimizer)
            return loss, harder, slope

        return [model], step

    _, _, numbers = check_loop(make)
    assert numbers[1] > numbers[0]


def test_saliency_of_each_class() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        model, optimizer = mlp(6, 3), sgd()

        def step() -> Any:
            x = tf.constant(X)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                logits = model(x, training=False)
                scores = [logits[:, k] for k in range(3)]
                loss = ops.mean(ops.square(logits))
            maps = [tape.gradient(score, x) for score in scores]
            apply(tape, loss, model, optimizer)
            return maps

        return [model], step

    _, _, (first, second, *_) = check_loop(make)
    assert np.abs(first - second).max() > 0.01


# --- teachers ---


def distiller(*losses: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        return keras.distillation.Distiller(
            teacher=mlp(6, 3, "teacher"), student=mlp(6, 3, "student"), distillation_losses=list(losses)
        )

    return make


@pytest.mark.parametrize("kind", ["logits", "features", "both"])
def test_keras_own_distiller(kind: str) -> None:
    logits = keras.distillation.LogitsDistillation(temperature=2.0)
    features = keras.distillation.FeatureDistillation("mse", teacher_layer_name="two", student_layer_name="one")
    losses = {"logits": [logits], "features": [features], "both": [logits, features]}[kind]
    compile = {
        "optimizer": "sgd",
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    plain, piped = check_fit(distiller(*losses), (X, LABELS), compile=compile)
    keras.utils.set_random_seed(0)
    initial = distiller(*losses)()
    assert largest_difference(initial.teacher, piped.teacher) == 0
    assert largest_difference(initial.student, piped.student) > 1e-3
    assert largest_difference(plain.student, piped.student) <= 1e-6
    assert len(devices_of(piped.student)) == 3


def test_a_teacher_that_is_the_moving_average_of_its_student() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        student, teacher, optimizer = mlp(name="student"), mlp(name="teacher"), sgd()
        teacher.set_weights(student.get_weights())
        noise = tf.constant(0.1 * normal(ROWS, 6, seed=4))

        def step() -> Any:
            wanted = teacher(tf.constant(X) + noise, training=False)
            with tf.GradientTape() as tape:
                given = student(tf.constant(X), training=True)
                loss = ops.mean(ops.square(given - Y)) + 0.5 * ops.mean(ops.square(given - wanted))
            apply(tape, loss, student, optimizer)
            for old, new in zip(teacher.weights, student.weights, strict=True):
                old.assign(0.8 * old + 0.2 * new)
            return loss

        return [student, teacher], step

    check_loop(make)


# --- one model called several times ---


def with_batch_norm(inputs: int = 6, outputs: int = 3) -> keras.Model:
    x = keras.Input([inputs])
    y = layers.Dense(8, use_bias=False)(x)  # a bias would be normalised away
    y = layers.BatchNormalization(momentum=0.8)(y)
    y = layers.Dense(8, "tanh")(y)
    return keras.Model(x, layers.Dense(outputs)(y), name="normalised")


def triplet(anchor: Any, positive: Any, negative: Any) -> Any:
    near, far = (ops.sum(ops.square(anchor - other), axis=-1) for other in (positive, negative))
    return ops.mean(ops.softplus(near - far + 0.5))


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_model_called_three_times_in_a_step(num_micro_batches: int) -> None:
    normalised = num_micro_batches == 1

    def make() -> tuple[list[keras.Model], Step]:
        model, optimizer = with_batch_norm() if normalised else mlp(6, 3), sgd()
        others = normal(ROWS, 6, seed=5), normal(ROWS, 6, seed=6)

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = triplet(*(model(tf.constant(part), training=True) for part in (X, *others)))
            apply(tape, loss, model, optimizer)
            return loss

        return [model], step

    check_loop(make, num_micro_batches=num_micro_batches)


def test_twins_in_a_graph_whose_batch_norm_is_moved_by_both_calls() -> None:
    def contrastive(y: Any, distance: Any) -> Any:
        return y * ops.square(distance) + (1.0 - y) * ops.square(ops.relu(1.0 - distance))

    def make() -> keras.Model:
        a, b = keras.Input([6], name="a"), keras.Input([6], name="b")
        twin = with_batch_norm()
        left, right = twin(a), twin(b)
        return keras.Model([a, b], ops.sqrt(ops.sum(ops.square(left - right), axis=1, keepdims=True) + 1e-6))

    same = (np.arange(ROWS)[:, None] % 2).astype("float32")
    data = ([X, 2.0 * X[::-1]], same)
    _, piped = check_fit(make, data, 3, 1, compile=lambda: {"optimizer": sgd(), "loss": contrastive})
    twin = piped.get_layer("normalised")
    (kernel,), normalisation = twin.layers[1].get_weights(), twin.layers[2]
    wanted = normalisation.moving_mean.numpy()
    for part in data[0]:
        wanted = 0.8 * wanted + 0.2 * (part @ kernel).mean(axis=0)
    piped.optimizer.learning_rate = 0.0
    piped.train_on_batch(*data)
    np.testing.assert_allclose(normalisation.moving_mean.numpy(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["training first", "inference first"])
def test_calls_with_different_training_flags_in_one_step(order: str) -> None:
    flags = [True, False] if order == "training first" else [False, True]

    def make() -> tuple[list[keras.Model], Step]:
        x = keras.Input([6])
        y = layers.BatchNormalization(momentum=0.8)(layers.Dense(8, use_bias=False)(x))
        y = layers.Dropout(0.4, seed=5)(layers.Dense(8, "tanh")(y))
        model, optimizer = keras.Model(x, layers.Dense(2)(y)), sgd()

        def step() -> Any:
            with tf.GradientTape() as tape:
                a, b = (model(tf.constant(X), training=flag) for flag in flags)
                loss = ops.mean(ops.square(a - Y)) + ops.mean(ops.square(a - b))
            apply(tape, loss, model, optimizer)
            return loss, ops.mean(ops.square(a - b))

        return [model], step

    _, _, numbers = check_loop(make, num_micro_batches=1)
    assert numbers[1] > 1e-3


def test_a_contrastive_loss_sees_all_rows_of_the_mini_batch() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        encoder, optimizer = mlp(6, 4, "encoder"), sgd()
        views = X + 0.1 * normal(ROWS, 6, seed=7), X + 0.1 * normal(ROWS, 6, seed=8)

        def step() -> Any:
            with tf.GradientTape() as tape:
                a, b = (ops.normalize(encoder(tf.constant(view), training=True), axis=-1) for view in views)
                similar = ops.matmul(a, ops.transpose(b)) / 0.5
                own = ops.arange(ROWS)
                loss = ops.mean(ops.sparse_categorical_crossentropy(own, similar, from_logits=True))
            apply(tape, loss, encoder, optimizer)
            return loss, similar

        return [encoder], step

    _, _, numbers = check_loop(make)
    assert numbers[1].shape == (ROWS, ROWS)


# --- autoencoders ---


class Sampling(layers.Layer):
    """Draws around a mean, and adds the divergence from the standard normal distribution to the loss."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, inputs: Any) -> Any:
        mean, log_variance = inputs
        divergence = ops.exp(log_variance) + ops.square(mean) - 1.0 - log_variance
        self.add_loss(0.5 * ops.mean(ops.sum(divergence, axis=1)))
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.seeds)


def variational() -> keras.Model:
    x = keras.Input([6])
    h = layers.Dense(8, "tanh")(x)
    z = Sampling(name="sampling")([layers.Dense(3, name="mean")(h), layers.Dense(3, name="log_variance")(h)])
    return keras.Model(x, layers.Dense(6)(layers.Dense(8, "tanh")(z)))


def test_a_variational_autoencoder() -> None:
    _, piped = check_fit(variational, (X, X), 4, 1)
    assert piped.losses


def test_a_variational_autoencoder_of_several_micro_batches_depends_on_no_stage_count() -> None:
    one, four = (train(variational, (X, X), tf_gpipe.GPipeStrategy(stages, 3), batch_size=4) for stages in (1, 4))
    assert_same(one, four)
    assert len(set(one[1]["loss"])) == 2
    assert len(devices_of(four[0])) == 4


class Decode(layers.Layer):
    """The transpose of a dense layer, with a bias of its own."""

    def __init__(self, encoder: layers.Dense, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.encoder = encoder

    def build(self, shape: Any) -> None:
        self.bias = self.add_weight(shape=(self.encoder.kernel.shape[0],), name="bias")

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.encoder.kernel)) + self.bias


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_autoencoder_whose_decoder_uses_the_encoders_kernels(optimizer: str) -> None:
    def make() -> keras.Model:
        outer, inner = layers.Dense(5, "tanh", name="outer"), layers.Dense(3, "tanh", name="inner")
        x = keras.Input([6])
        y = ops.tanh(Decode(inner, name="first")(inner(outer(x))))
        return keras.Model(x, Decode(outer, name="second")(y))

    _, piped = check_fit(make, (X, X), compile={"optimizer": optimizer, "loss": "mse"})
    assert len(piped.trainable_variables) == 6


def test_an_encoder_that_predicts_between_two_trainings_of_the_whole() -> None:
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(3, 2)):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            x = keras.Input([6])
            code = layers.Dense(3, "tanh")(layers.Dense(5, "tanh")(layers.Dense(7, "tanh")(x)))
            encoder = keras.Model(x, code, name="encoder")
            whole = keras.Model(x, layers.Dense(6)(layers.Dense(7, "tanh")(code)), name="whole")
            whole.compile(sgd(), "mse")
        numbers = []
        for _ in range(2):
            numbers += whole.fit(X, X, batch_size=5, epochs=1, shuffle=False, verbose=0).history["loss"]
            numbers += [*encoder.predict(X, batch_size=5, verbose=0).ravel()]
        found.append((whole, numbers))
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-6, atol=1e-6)
    assert found[0][1][0] != found[0][1][len(found[0][1]) // 2]
    assert largest_difference(found[0][0], found[1][0]) <= 1e-6
    assert len(devices_of(found[1][0])) == 3


# --- several losses, heads and rates ---


def heads() -> keras.Model:
    """A trunk of three layers, each with a head of its own."""
    x = keras.Input([6])
    one = layers.Dense(8, "tanh", name="one")(x)
    two = layers.Dense(8, "tanh", name="two")(one)
    three = layers.Dense(8, "tanh", name="three")(two)
    outputs = {"early": layers.Dense(1, name="early")(one), "middle": layers.Dense(3, name="middle")(two)}
    return keras.Model(x, {**outputs, "late": layers.Dense(2, name="late")(three)})


def test_heads_in_different_stages() -> None:
    def compile() -> dict[str, Any]:
        classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return {
            "optimizer": keras.optimizers.SGD(0.1, global_clipnorm=0.5),
            "loss": {"early": "mae", "middle": classes, "late": "mse"},
            "loss_weights": {"early": 0.2, "middle": 1.0, "late": 3.0},
            "weighted_metrics": {"middle": ["accuracy"]},
        }

    y = {"early": Y[:, :1], "middle": LABELS, "late": Y}
    weights = {name: np.linspace(k, k + 1.0, ROWS, dtype="float32") for k, name in enumerate(y)}
    _, piped = check_fit(heads, (X, y), 4, 3, [2, 2, 1, 1], compile=compile, sample_weight=weights)
    homes = [piped.get_layer(name).kernel.value.device for name in y]
    assert len(set(homes)) == 3


def test_several_gradients_of_one_tape() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        model, optimizer = heads(), sgd()

        def step() -> Any:
            with tf.GradientTape(persistent=True) as tape:
                out = model(tf.constant(X), training=True)
                losses = [ops.mean(ops.square(out["late"] - Y)), ops.mean(ops.abs(out["early"] - Y[:, :1]))]
                losses.append(ops.mean(ops.square(out["middle"])))
            weights = model.trainable_weights
            parts = [
                [
                    ops.zeros_like(w) if g is None else g
                    for w, g in zip(weights, tape.gradient(loss, weights), strict=True)
                ]
                for loss in losses
            ]
            sizes = [tf.linalg.global_norm(part) for part in parts]  # each task is given the same weight
            total = [sum(g / size for g, size in zip(group, sizes, strict=True)) for group in zip(*parts, strict=True)]
            optimizer.apply_gradients(zip(total, weights, strict=True))
            return losses, sizes

        return [model], step

    check_loop(make, num_stages=4)


def test_a_regulariser_in_several_losses_of_one_tape() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        x = keras.Input([6])
        y = layers.Dense(8, "tanh", kernel_regularizer="l2")(layers.Dense(8, "tanh", kernel_regularizer="l1")(x))
        model, optimizer = keras.Model(x, layers.Dense(2)(y)), sgd()

        def step() -> Any:
            with tf.GradientTape(persistent=True) as tape:
                given = model(tf.constant(X), training=True)
                penalty = sum(model.losses)
                losses = ops.mean(ops.square(given - Y)) + penalty, ops.mean(ops.abs(given - Y)) + penalty
            weights = model.trainable_weights
            first, second = (tape.gradient(loss, weights) for loss in losses)
            optimizer.apply_gradients([(a + 0.5 * b, w) for a, b, w in zip(first, second, weights, strict=True)])
            return losses

        return [model], step

    check_loop(make)


class RatesOfLayers(keras.Model):
    """Multiplies the gradients of each layer by a rate of its own."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        weights = self.trainable_weights
        rates = [{"one": 0.1, "two": 1.0}.get(weight.path.split("/")[0], 2.0) for weight in weights]
        gradients = [rate * g for rate, g in zip(rates, tape.gradient(loss, weights), strict=True)]
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def test_a_learning_rate_for_each_layer() -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        y = layers.Dense(8, "tanh", name="two")(layers.Dense(8, "tanh", name="one")(x))
        return RatesOfLayers(x, layers.Dense(2, name="three")(y))

    check_fit(make)


def test_two_optimizers_for_two_parts_of_a_model() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        model = mlp()
        low, high = keras.optimizers.SGD(0.05, momentum=0.9), keras.optimizers.SGD(0.2)
        weights = model.trainable_weights
        low.build(weights[:3])
        high.build(weights[3:])

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(model(tf.constant(X), training=True) - Y))
            gradients = tape.gradient(loss, weights)
            low.apply_gradients(zip(gradients[:3], weights[:3], strict=True))
            high.apply_gradients(zip(gradients[3:], weights[3:], strict=True))
            return loss, [v.value for v in low.variables]

        return [model], step

    check_loop(make)


def test_no_gradient_passes_a_stop() -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        one = layers.Dense(8, "tanh", name="one")(x)
        two = layers.Dense(8, "tanh", name="two")(ops.stop_gradient(one))
        return keras.Model(x, [layers.Dense(2, name="probe")(two), layers.Dense(2, name="own")(one)])

    compile = {"loss": ["mse", "mse"], "loss_weights": [1.0, 0.0]}
    plain, piped = check_fit(make, (X, [Y, Y]), compile=lambda: {"optimizer": sgd(), **compile})
    keras.utils.set_random_seed(0)
    initial = make()
    for name, moved in (("one", False), ("own", False), ("two", True), ("probe", True)):
        pairs = zip(initial.get_layer(name).get_weights(), piped.get_layer(name).get_weights(), strict=True)
        assert any(np.any(a != b) for a, b in pairs) == moved, name
    assert plain.count_params() == piped.count_params()


def test_a_model_that_is_frozen_and_thawed_within_a_step() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        first, second, optimizer = mlp(6, 2, "first"), mlp(2, 2, "second"), sgd()

        def step() -> Any:
            losses = []
            for frozen in (second, first):
                frozen.trainable = False
                with tf.GradientTape() as tape:
                    losses.append(ops.mean(ops.square(second(first(tf.constant(X), training=True), training=True) - Y)))
                weights = first.trainable_weights + second.trainable_weights
                assert len(weights) == 6
                optimizer.apply_gradients(zip(tape.gradient(losses[-1], weights), weights, strict=True))
                frozen.trainable = True
            return losses

        optimizer.build(first.trainable_weights + second.trainable_weights)
        return [first, second], step

    check_loop(make)


# --- loops of one's own ---


def test_gradients_accumulated_in_a_loop_of_ones_own() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        model, optimizer = mlp(), sgd()
        sums = [keras.Variable(np.zeros(w.shape, "float32"), trainable=False) for w in model.trainable_weights]

        def step() -> Any:
            losses = []
            for part in (slice(0, 7), slice(7, ROWS)):
                with tf.GradientTape() as tape:
                    losses.append(ops.sum(ops.square(model(tf.constant(X[part]), training=True) - Y[part])))
                for total, g in zip(sums, tape.gradient(losses[-1], model.trainable_weights), strict=True):
                    total.assign(total + g / ROWS)
            pairs = zip([total.value for total in sums], model.trainable_weights, strict=True)
            optimizer.apply_gradients(list(pairs))
            for total in sums:
                total.assign(ops.zeros_like(total))
            return losses

        return [model], step

    check_loop(make)


def test_a_policy_gradient_with_a_baseline() -> None:
    def make() -> tuple[list[keras.Model], Step]:
        x = keras.Input([6])
        y = layers.Dense(8, "tanh")(layers.Dense(8, "tanh")(x))
        model = keras.Model(x, [layers.Dense(3, name="policy")(y), layers.Dense(1, name="value")(y)])
        optimizer, seeds = sgd(), keras.random.SeedGenerator(7)
        table = tf.constant(normal(ROWS, 3, seed=9))

        def step() -> Any:
            with tf.GradientTape() as tape:
                logits, value = model(tf.constant(X), training=True)
                actions = keras.random.categorical(ops.stop_gradient(logits), 1, seed=seeds)
                rewards = ops.take_along_axis(table, actions, axis=1)
                advantage = ops.stop_gradient(rewards - value)
                chosen = ops.take_along_axis(ops.log_softmax(logits), actions, axis=1)
                entropy = -ops.mean(ops.sum(ops.softmax(logits) * ops.log_softmax(logits), axis=1))
                loss = -ops.mean(chosen * advantage) + ops.mean(ops.square(rewards - value)) - 0.01 * entropy
            apply(tape, loss, model, optimizer)
            return loss, actions

        return [model], step

    _, _, numbers = check_loop(make, num_stages=4)
    assert len(np.unique(numbers[1])) > 1


def test_steps_from_the_worst_point_nearby() -> None:
    """Sharpness-aware minimisation: weights are moved uphill and back within a step."""

    def make() -> tuple[list[keras.Model], Step]:
        model, optimizer = mlp(), sgd()
        weights = model.trainable_weights

        def slope() -> tuple[Any, list[Any]]:
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(model(tf.constant(X), training=True) - Y))
            return loss, tape.gradient(loss, weights)

        def step() -> Any:
            loss, gradients = slope()
            size = tf.linalg.global_norm(gradients)
            moves = [0.3 * g / size for g in gradients]
            for w, move in zip(weights, moves, strict=True):
                w.assign(w + move)
            worse, gradients = slope()
            for w, move in zip(weights, moves, strict=True):
                w.assign(w - move)
            optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return loss, worse

        return [model], step

    _, _, numbers = check_loop(make)
    assert numbers[1] > numbers[0] + 0.01


# --- models in models ---


class Around(keras.Model):
    """A model with a `call` of its own around another one."""

    def __init__(self, inner: keras.Model) -> None:
        super().__init__()
        self.inner = inner
        self.head = layers.Dense(2, name="head")

    def call(self, x: Any, training: bool | None = None) -> Any:
        return self.head(ops.tanh(self.inner(x, training=training)))


def test_a_pipelined_model_inside_a_model_of_ones_own() -> None:
    plain, piped = check_fit(lambda: Around(mlp(6, 5, "inner")), num_stages=4)
    assert len(devices_of(piped.inner)) >= 3
    np.testing.assert_allclose(piped.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


class TrainsInner(keras.Model):
    """Made outside the scope: only its inner model is pipelined, by a step of its own."""

    def __init__(self, inner: keras.Model, strategy: tf_gpipe.GPipeStrategy | None) -> None:
        super().__init__()
        self.inner, self.strategy = inner, strategy

    def call(self, x: Any) -> Any:
        return self.inner(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        def step(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self.inner(x, training=True) - y))
            apply(tape, loss, self.inner, self.optimizer)
            return loss

        return {"value": step(*data) if self.strategy is None else self.strategy.run(step, args=data)}


def test_a_pipelined_model_inside_a_plain_model_that_runs_the_strategy_itself() -> None:
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(3, 3)):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            inner = mlp(6, 2, "inner")
        if strategy is not None:
            strategy.place(inner)
        model = TrainsInner(inner, strategy)
        model.compile(sgd())
        history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        found.append((model, history))
    assert_same(*found)
    assert found[0][1]["value"][0] != found[0][1]["value"][1]
    assert len(devices_of(found[1][0])) == 3


# --- stages compiled by XLA ---


def batches(sizes: list[int]) -> tf.data.Dataset:
    """Batches of sizes that no one knows before the step."""

    def made() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for size in sizes:
            yield X[:size], Y[:size]

    return tf.data.Dataset.from_generator(made, output_signature=(tf.TensorSpec([None, 6]), tf.TensorSpec([None, 2])))


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras counts the batches of a generator so
@pytest.mark.parametrize("remat", ["except_last", "always"])
def test_compiled_stages_take_batches_of_sizes_that_are_unknown(remat: str) -> None:
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(2, 4, remat=remat, jit_compile=True)):
        keras.utils.set_random_seed(0)
        with scope_of(strategy):
            model = mlp()
            model.compile(sgd(), "mse")
        history = model.fit(batches([8, 3, 10, 1]), epochs=2, shuffle=False, verbose=0).history["loss"]
        numbers = [*history, model.evaluate(batches([2, 9]), verbose=0)]
        found.append((model, [*numbers, *model.predict(batches([1, 9]), verbose=0).ravel()]))
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=2e-6, atol=1e-6)
    assert largest_difference(found[0][0], found[1][0]) <= 1e-6
    assert found[0][1][0] != found[0][1][1]
    assert len(devices_of(found[1][0])) == 2


def test_compiled_stages_take_a_last_batch_that_is_smaller() -> None:
    plain = train(mlp, (X, Y), batch_size=7, validation_data=(X[:3], Y[:3]))
    piped = train(
        mlp, (X, Y), tf_gpipe.GPipeStrategy(3, 4, jit_compile=True), batch_size=7, validation_data=(X[:3], Y[:3])
    )
    assert_same(plain, piped)
    assert plain[1]["loss"][0] != plain[1]["loss"][1]
    assert len(devices_of(piped[0])) == 3
