"""The AmoebaNet of the ImageNet example: published numbers of parameters, shapes, recipe, the same in any pipeline."""

import resource
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers import largest_difference, normal, scope_of, use_floats

import tf_gpipe

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from amoebanet import training
from amoebanet.model import Cell, Classifier, FactorizedReduction, Stem, amoebanet, most_stages
from shapes import count_parameters, shapes_only

TORCH = {"layout": "torch"}
HEAD = {"auxiliary_head": True}
COUNTS = [
    # torchgpipe's five published sizes, which round to its README's
    ("D", 18, 208, 224, 1000, TORCH, 81_505_540),
    ("D", 18, 416, 224, 1000, TORCH, 319_024_120),
    ("D", 18, 544, 224, 1000, TORCH, 542_734_840),
    ("D", 36, 544, 224, 1000, TORCH, 1_055_832_376),
    ("D", 72, 512, 224, 1000, TORCH, 1_844_858_344),
    # the GPipe paper's 557M
    ("B", 18, 512, 480, 1001, {}, 557_286_057),
    ("D", 18, 256, 224, 1001, {}, 121_915_113),
    ("D", 18, 208, 224, 1001, HEAD, 81_785_166),
    ("D", 3, 16, 64, 1001, {}, 354_190),
    ("D", 6, 32, 64, 1001, {}, 1_180_625),
    ("B", 6, 32, 64, 1001, {}, 1_321_805),
    ("A", 6, 32, 64, 1001, {}, 1_586_685),
]


@pytest.mark.parametrize(("genotype", "cells", "filters", "size", "classes", "options", "count"), COUNTS)
def test_parameters(genotype, cells, filters, size, classes, options, count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with shapes_only():
        model = amoebanet(genotype, cells, filters, size, classes, **options)
    assert count_parameters(model) == count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # 512 MiB, where the largest has 7 GB


def test_moving_statistics_are_not_trained():
    with shapes_only():
        model = amoebanet("D", 18, 256, 224, 1001)
    assert sum(np.prod(v.shape) for v in model.non_trainable_weights) == 204_448


@pytest.mark.parametrize("auxiliary_head", [False, True])
def test_as_many_stages_as_layers(auxiliary_head):
    with shapes_only():
        model = amoebanet("D", 6, 16, 67, 10, auxiliary_head=auxiliary_head)
        plan = tf_gpipe.GPipeStrategy(1).plan(model)
    assert len(plan.stages[0].operations) == most_stages(6, auxiliary_head)


def test_shapes_at_224_pixels():
    with shapes_only():
        model = amoebanet("D", 3, 256, 224, 1001, auxiliary_head=True)
    shapes = {layer.name: layer.output[0].shape[1:] for layer in model.layers if isinstance(layer, Cell)}
    assert model.get_layer("stem").output.shape[1:] == (111, 111, 32)
    assert shapes == {
        "stem_cell_0": (56, 56, 192),
        "stem_cell_1": (28, 28, 384),
        "cell_0": (28, 28, 1024),
        "reduction_0": (14, 14, 1536),
        "cell_1": (14, 14, 2048),
        "reduction_1": (7, 7, 3072),
        "cell_2": (7, 7, 4096),
    }
    assert {name: tensor.shape for name, tensor in model.output.items()} == {
        "logits": (None, 1001),
        "auxiliary": (None, 1001),
    }


@pytest.mark.parametrize("reduction", [False, True])
@pytest.mark.parametrize("genotype", ["A", "B", "D"])
def test_a_cell_makes_the_shapes_that_it_promises(genotype, reduction):
    current, previous = normal(2, 5, 7, 6), normal(2, 9, 13, 4)
    cell = Cell(genotype, 8, reduction)
    made, passed = cell((current, previous))
    promised, _ = cell.compute_output_shape((current.shape, previous.shape))
    assert made.shape == promised
    np.testing.assert_array_equal(passed, current)


def test_the_torch_stem_keeps_the_border():
    stem = Stem(4, torch=True)
    assert stem(normal(1, 8, 9, 3)).shape == stem.compute_output_shape((1, 8, 9, 3)) == (1, 4, 5, 4)


def test_factorized_reduction_takes_even_and_odd_pixels():
    x = normal(1, 5, 4, 3)
    layer = FactorizedReduction(6)
    layer.build(x.shape)
    for part in (layer.even, layer.odd):
        part.kernel.assign(np.eye(3)[None, None])
    made = layer(x).numpy() * np.sqrt(1 + 1e-5)  # a new batch norm divides by the root of 1 + epsilon
    np.testing.assert_allclose(made[..., :3], x[:, ::2, ::2], atol=1e-6)
    np.testing.assert_allclose(made[:, :2, :, 3:], x[:, 1::2, 1::2], atol=1e-6)
    np.testing.assert_array_equal(made[:, 2, :, 3:], 0)


def test_impossible_networks_are_refused():
    with pytest.raises(ValueError, match="Expected genotype A, B or D"):
        amoebanet("E")
    with pytest.raises(ValueError, match="multiple of 3"):
        amoebanet("D", 4, 16, 64)
    with shapes_only(), pytest.raises(ValueError, match="leave the head out"):
        amoebanet("D", 3, 16, 64, auxiliary_head=True)


def test_dropped_paths():
    cell = Cell("D", 4, drop_path=True)
    pair = normal(2000, 2, 2, 4), normal(2000, 2, 2, 4)
    np.testing.assert_allclose(cell(pair, training=False)[0], cell(pair, training=False)[0])
    cell.keep.assign(0.75)
    masks = np.stack([mask.numpy() for mask in cell.masks(pair[0])])
    assert masks.shape == (8, 2000, 1, 1, 1)  # ten operations, two of which are `none`
    np.testing.assert_allclose(np.unique(masks), [0, 1 / 0.75], rtol=1e-6)
    np.testing.assert_allclose(masks.mean(axis=(1, 2, 3, 4)), 1, atol=0.06)  # five standard deviations


def test_paths_are_dropped_in_training_only():
    cell = Cell("D", 4, drop_path=True)
    pair = normal(4, 2, 2, 4), normal(4, 2, 2, 4)
    cell(pair)
    cell.keep.assign(1e-6)
    trained = cell(pair, training=True)[0].numpy()
    kept = trained[..., 4:8]  # state 3 is `none` of the previous input, plus a path that is dropped
    np.testing.assert_array_equal(kept, pair[1])
    assert np.all(cell(pair, training=False)[0][..., 4:8] != pair[1])


def small_network(drop_path: bool = False, **options) -> keras.Model:
    """A stem, three cells and a classifier, for images of 12x12 pixels."""
    images = keras.Input((12, 12, 3))
    stem = Stem(4, name="stem", **options)(images)
    pair = Cell("D", 4, True, False, drop_path, name="stem_cell", **options)((stem, stem))
    pair = Cell("B", 4, False, True, drop_path, name="cell_0", **options)(pair)
    pair = Cell("D", 4, False, True, drop_path, name="cell_1", **options)(pair)
    return keras.Model(images, {"logits": Classifier(5, name="classifier", **options)(pair[0])})


def small_batch(rows: int = 12) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    return normal(rows, 12, 12, 3), {"logits": np.eye(5)[np.arange(rows) % 5]}


def test_two_stages_come_to_the_weights_of_one():
    before = keras.config.floatx(), keras.config.dtype_policy()
    use_floats("float64")  # in float32, rounding now and then flips a ReLU
    try:
        models = []
        for partition in ([3, 2], [5]):
            strategy = tf_gpipe.GPipeStrategy(len(partition), 2, partition=partition, remat="always")
            keras.utils.set_random_seed(0)
            with scope_of(strategy):
                model = small_network()
                model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True))
            model.fit(*small_batch(), batch_size=6, epochs=2, shuffle=False, verbose=0)
            models.append(model)
            if len(partition) == 2:
                assert [len(stage.inputs) for stage in strategy.plan(model).stages] == [1, 2]  # a cut sends a pair
        assert largest_difference(*models) < 1e-12
    finally:
        use_floats(before[0])
        keras.config.set_dtype_policy(before[1])


def test_a_saved_model_gives_the_same(tmp_path):
    model = small_network(drop_path=True)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x, _ = small_batch()
    np.testing.assert_array_equal(loaded.predict(x, verbose=0)["logits"], model.predict(x, verbose=0)["logits"])


def test_mixed_precision():
    model = small_network(drop_path=True, dtype="mixed_bfloat16")
    passed = {model.get_layer("stem").output.dtype, *(x.dtype for x in model.get_layer("cell_1").output)}
    assert passed == {"bfloat16"}
    logits = model(small_batch()[0], training=True)["logits"]
    assert logits.dtype == model.output["logits"].dtype == "float32"
    assert {weight.dtype for weight in model.weights} == {"float32"}


def test_weight_decay_is_half_the_sum_of_squares():
    model = small_network(weight_decay=0.01)
    kernels = [v.numpy() for v in model.trainable_weights if v.name.endswith("kernel")]
    expected = 0.01 / 2 * sum(np.sum(kernel.astype("float64") ** 2) for kernel in kernels)
    np.testing.assert_allclose(float(sum(model.losses)), expected, rtol=1e-5)


def test_loss_smooths_labels_and_weighs_the_auxiliary_head():
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    outputs = {name: keras.layers.Dense(5, name=name)(x) for name in ("auxiliary", "logits")}
    model = keras.Model(x, outputs)
    training.compile_model(model, 0.1, average=0.0)
    rows, labels = normal(6, 4), np.eye(5)[np.arange(6) % 5]
    found = model.evaluate(rows, dict.fromkeys(outputs, labels), verbose=0, return_dict=True)

    def entropy(logits):
        log_p = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        return -np.mean(np.sum((0.9 * labels + 0.1 / 5) * log_p, axis=-1))

    made = model.predict(rows, verbose=0)
    np.testing.assert_allclose(found["loss"], entropy(made["logits"]) + 0.4 * entropy(made["auxiliary"]), rtol=1e-5)
    top_1, _ = (found[name] for name in training.metric_names(model))
    assert top_1 == pytest.approx(np.mean(made["logits"].argmax(-1) == labels.argmax(-1)))


def test_learning_rate():
    rate = training.WarmUpAndDecay(0.64, steps_per_epoch=10)
    steps = {
        0: 0.0,
        15: 0.32,
        29: 0.64 * 29 / 30,
        30: 0.64 * 0.9**3,
        39: 0.64 * 0.9**3,
        40: 0.64 * 0.9**4,
        5000: 0.64e-4,
    }
    for step, expected in steps.items():
        assert float(rate(step)) == pytest.approx(expected, rel=1e-5)
    assert float(training.WarmUpAndDecay.from_config(rate.get_config())(15)) == pytest.approx(0.32)
    assert float(training.WarmUpAndDecay(0.5, 10, warm_up_epochs=0)(0)) == 0.5


def test_dropped_paths_follow_their_schedule():
    model = small_network(drop_path=True)
    model.compile("sgd", keras.losses.CategoricalCrossentropy(from_logits=True), run_eagerly=True)
    callback = training.ScheduledDropPath(0.7, num_steps=4)
    callback.set_model(model)
    callback.on_train_begin()
    found = []
    for step in range(6):
        callback.on_train_batch_begin(step)
        found.append([float(layer.keep) for layer in model.layers if isinstance(layer, Cell)])
    np.testing.assert_allclose(found, np.transpose([[1, 0.925, 0.85, 0.775, 0.7, 0.7]] * 3), rtol=1e-6)


def test_checkpoints_hold_weights_optimizer_and_seeds(tmp_path):
    def make() -> tuple[training.Checkpoints, list[keras.Variable]]:
        model = small_network(drop_path=True)
        training.compile_model(model, 0.1, average=0.9)
        *cells, classifier = model.layers[2:]
        seeds = [layer.seed_generator.state for layer in (*cells, classifier.parts[0][2])]  # of the dropout
        return training.Checkpoints(model, tmp_path), [*model.weights, *model.optimizer.variables, *seeds]

    checkpoints, saved = make()
    assert training.epochs_done(tmp_path) == 0
    for i, variable in enumerate(saved):
        variable.assign(np.full(variable.shape, i + 1))
    checkpoints.callback.on_epoch_end(4, {})

    assert training.epochs_done(tmp_path) == 5
    checkpoints, restored = make()
    checkpoints.restore()
    for found, wanted in zip(restored, saved, strict=True):
        np.testing.assert_array_equal(found, wanted, err_msg=wanted.path)


def test_pretrained_weights_come_without_the_classifier(tmp_path):
    keras.utils.set_random_seed(0)
    source = small_network()
    source.save_weights(tmp_path / "source.weights.h5")
    keras.utils.set_random_seed(1)
    model = small_network()
    new = model.get_layer("classifier").get_weights()
    training.load_pretrained(model, tmp_path / "source.weights.h5")
    for layer, before in zip(model.layers, source.layers, strict=True):
        expected = new if layer.name == "classifier" else before.get_weights()
        for found, wanted in zip(layer.get_weights(), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
