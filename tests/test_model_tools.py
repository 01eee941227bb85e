"""What is made of a model trained in stages: summaries, plots, parts, copies and exports, as in plain Keras."""

import copy
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same_optimizer, largest_difference, normal, scope_of
from keras import layers

import tf_gpipe

ROWS = 12
X, Z, Y = normal(ROWS, 4), normal(ROWS, 3, seed=1), normal(ROWS, 1, seed=2)


def gpipe(num_stages: int = 3, num_micro_batches: int = 2) -> tf_gpipe.GPipeStrategy:
    return tf_gpipe.GPipeStrategy(num_stages, num_micro_batches)


def nested() -> keras.Model:
    """Two inputs, two outputs, a model inside, and dropout that is idle outside training."""
    x, z = keras.Input([4], name="x"), keras.Input([3], name="z")
    inner = keras.Sequential(
        [keras.Input([4]), layers.Dense(6, "tanh", name="a"), layers.Dense(5, name="b")], name="inner"
    )
    y = layers.Dropout(0.0, name="drop")(layers.Concatenate(name="join")([inner(x), z]))
    y = layers.Dense(6, "tanh", name="late")(y)
    return keras.Model(
        {"x": x, "z": z}, {"p": layers.Dense(1, name="p")(y), "q": layers.Dense(2, name="q")(y)}, name="net"
    )


def chain() -> keras.Model:
    middle = [layers.Dense(6, "tanh", name=name) for name in ("one", "two")]
    return keras.Sequential([keras.Input([4], name="x"), *middle, layers.Dense(1, name="head")], name="chain")


class Own(keras.Model):
    """A subclassed model."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.one, self.two, self.head = layers.Dense(6, "tanh"), layers.Dense(6, "tanh"), layers.Dense(1)

    def call(self, x):
        return self.head(self.two(self.one(x)))


NESTED = {"x": X, "z": Z}, {"p": Y, "q": np.tile(Y, 2)}


def sgd() -> keras.Optimizer:
    return keras.optimizers.SGD(0.1, momentum=0.9)


def fit(model: keras.Model, data: tuple[Any, Any] = (X, Y), epochs: int = 1) -> list[float]:
    return model.fit(*data, batch_size=5, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def compiled(make: Callable[[], keras.Model], strategy: tf_gpipe.GPipeStrategy | None) -> keras.Model:
    keras.backend.clear_session()  # so that names begin anew
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(sgd(), "mse")
    return model


def both(make: Callable[[], keras.Model] = chain, data: tuple[Any, Any] | None = (X, Y)) -> list[keras.Model]:
    """The same model, plainly and in a pipeline, trained where there are data."""
    models = [compiled(make, strategy) for strategy in (None, gpipe())]
    if data is not None:
        losses = [fit(model, data) for model in models]
        np.testing.assert_allclose(losses[1], losses[0], rtol=2e-6)
        assert_pipelined(models[1])
        assert largest_difference(*models) <= 1e-6
    return models


def assert_pipelined(model: keras.Model, at_least: int = 3) -> None:
    """The model ran in so many stages, and its weights are on several devices."""
    pipelines = list(model._gpipe_pipelines[model.distribute_strategy].values())
    assert pipelines
    assert min(len(pipeline.stages) for pipeline in pipelines) >= at_least
    assert len({v.value.device for v in model.weights}) > 1


@pytest.fixture(scope="module")
def trained() -> list[keras.Model]:
    """A chain trained plainly, and in stages."""
    return both()


# --- descriptions ---


def summary(model: keras.Model, **arguments: Any) -> str:
    lines: list[str] = []
    model.summary(print_fn=lambda line, line_break=False: lines.append(line), **arguments)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("make", "data"), [(chain, (X, Y)), (nested, NESTED), (Own, (X, Y))], ids=["chain", "nested", "own"]
)
def test_a_summary_is_that_of_plain_keras(make, data):
    models = both(make, None)
    options = {"expand_nested": True, "show_trainable": True, "line_length": 120}
    before = [summary(model, **options) for model in models]
    assert before[0] == before[1]
    for model in models:
        fit(model, data)
    after = [summary(model, **options) for model in models]
    assert after[0] == after[1] != before[1]
    assert "Optimizer params" in after[1]
    assert_pipelined(models[1])


def test_counts_and_shapes_are_those_of_plain_keras():
    plain, ours = both(nested, NESTED)
    assert ours.count_params() == plain.count_params() == 30 + 35 + 54 + 7 + 14
    assert ours.output_shape == plain.output_shape
    assert ours.compute_output_shape({"x": (7, 4), "z": (7, 3)}) == {"p": (7, 1), "q": (7, 2)}
    assert [layer.name for layer in ours.layers] == [layer.name for layer in plain.layers]
    for i, layer in enumerate(ours.layers):
        assert ours.get_layer(layer.name) is ours.get_layer(index=i) is layer
    assert ours.get_layer("inner").get_layer("b").count_params() == 35
    with pytest.raises(ValueError, match="No such layer: stage_0"):
        ours.get_layer("stage_0")


def without_ids(config: Any) -> Any:
    """A config without the numbers of shared objects, which are addresses in memory."""
    if isinstance(config, dict):
        return {key: without_ids(value) for key, value in config.items() if key != "shared_object_id"}
    return [without_ids(value) for value in config] if isinstance(config, list) else config


# --- plots ---


def nodes_and_edges(dot: Any) -> tuple[list[str], int]:
    """Labels of all nodes of a graph, clusters included, and the number of its edges."""
    inside = [nodes_and_edges(graph) for graph in dot.get_subgraphs()]
    labels = [str(node.get_label()) for node in dot.get_nodes() if node.get_label()]
    return sorted(labels + [label for more, _ in inside for label in more]), len(dot.get_edges()) + sum(
        n for _, n in inside
    )


SHOWN = {
    "show_shapes": True,
    "show_dtype": True,
    "show_layer_names": True,
    "expand_nested": True,
    "show_layer_activations": True,
    "show_trainable": True,
}


def test_a_plot_is_that_of_plain_keras():
    found = [nodes_and_edges(keras.utils.model_to_dot(model, **SHOWN)) for model in both(nested, NESTED)]
    assert found[0] == found[1]
    labels, edges = found[1]
    assert len(labels) == edges + 1 == 9
    assert all(any(f"<b>{name}</b>" in label for label in labels) for name in ("a", "b", "join", "late", "p", "q"))


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed: `dot` draws the picture")
def test_a_picture_is_that_of_plain_keras(tmp_path):
    for name, model in zip(("plain", "ours"), both(nested, NESTED), strict=True):
        keras.utils.plot_model(model, tmp_path / f"{name}.dot", **SHOWN)
        keras.utils.plot_model(model, tmp_path / f"{name}.png", **SHOWN)
    written = [re.findall(r"<b>(\w+)</b>", (tmp_path / f"{name}.dot").read_text()) for name in ("plain", "ours")]
    assert written[0] == written[1]
    assert {"a", "b", "drop", "join", "late", "p", "q", "x", "z"} <= set(written[1])
    pictures = [tf.io.decode_png((tmp_path / f"{name}.png").read_bytes()) for name in ("plain", "ours")]
    assert pictures[0].shape == pictures[1].shape
    assert min(pictures[1].shape[:2]) > 200
    np.testing.assert_array_equal(*pictures)


# --- parts of a trained model ---


@pytest.mark.parametrize("scoped", [False, True], ids=["outside", "in scope"])
def test_the_output_of_a_layer_as_a_model_of_its_own(trained, scoped):
    plain, ours = trained
    strategy = ours.distribute_strategy
    with scope_of(strategy if scoped else None):
        part = keras.Model(ours.inputs, [ours.get_layer(name).output for name in ("two", "one", "head")])
    expected = keras.Model(plain.inputs, [plain.get_layer(name).output for name in ("two", "one", "head")])
    homes = [v.value.device for v in ours.weights]
    for a, b in zip(expected.predict(X, verbose=0), part.predict(X, verbose=0), strict=True):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-6)
    assert ("_gpipe_pipelines" in vars(part)) is scoped
    assert (part.distribute_strategy is strategy) is scoped
    if scoped:
        assert_pipelined(part)
    assert [v.value.device for v in ours.weights] == homes, "the model and its part share their weights"
    np.testing.assert_allclose(ours.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=0, atol=1e-6)


def test_a_new_head_on_a_frozen_part_of_a_trained_model():
    models = both()
    heads = []
    for model in models:
        frozen = [value.copy() for value in model.get_layer("one").get_weights()]
        with scope_of(model.distribute_strategy if model is models[1] else None):
            keras.utils.set_random_seed(1)
            base = keras.Model(model.inputs, model.get_layer("two").output)
            base.trainable = False
            made = keras.Model(
                base.inputs, layers.Dense(1, name="new")(layers.Dense(4, "tanh", name="wide")(base.output))
            )
            made.compile(sgd(), "mse")
        losses = fit(made, (X, -Y), epochs=2)
        assert losses[1] < losses[0]
        for a, b in zip(frozen, model.get_layer("one").get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)
        heads.append(made)
    assert_pipelined(heads[1], 2)  # the layers that they share stay on the two stages where they are
    assert largest_difference(*heads) <= 1e-6
    for model in models:  # the first model goes on, with its frozen layers as they were when it was compiled
        model.trainable = True
        for layer in model.layers:
            layer.trainable = True
        fit(model)
    assert largest_difference(*models) <= 1e-6


# --- copies ---


def through_config(model: keras.Model) -> keras.Model:
    return type(model).from_config(model.get_config())


def through_json(model: keras.Model) -> keras.Model:
    return keras.models.model_from_json(model.to_json())


def clone_with_another_activation(model: keras.Model) -> keras.Model:
    def change(layer: keras.Layer) -> keras.Layer:
        config = layer.get_config()
        if layer.name == "late":
            config["activation"] = "sigmoid"
        return type(layer).from_config(config)

    return keras.models.clone_model(model, clone_function=change)


@pytest.mark.parametrize(
    "copied", [keras.models.clone_model, through_config, through_json, clone_with_another_activation]
)
def test_a_copy_of_a_trained_model_is_trained(copied):
    models = both(nested, NESTED)
    assert without_ids(models[0].get_config()) == without_ids(models[1].get_config())
    copies = []
    for model, strategy in zip(models, (None, gpipe(4, 3)), strict=True):
        held = [value.copy() for value in model.get_weights()]
        with scope_of(strategy):
            keras.utils.set_random_seed(3)
            made = copied(model)
            made.compile(sgd(), "mse")
        start = [value.copy() for value in made.get_weights()]
        fit(made, NESTED)
        assert max(np.max(np.abs(a - b)) for a, b in zip(start, made.get_weights(), strict=True)) > 1e-3
        assert all(np.array_equal(a, b) for a, b in zip(held, model.get_weights(), strict=True)), "a copy of its own"
        copies.append(made)
    assert_pipelined(copies[1], 4)
    assert largest_difference(*copies) <= 1e-6
    if copied is clone_with_another_activation:
        assert copies[1].get_layer("late").activation is keras.activations.sigmoid


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_a_trained_model_is_copied_and_pickled(trained, how):
    plain, ours = trained
    expected = how(plain)
    with gpipe(2, 3).scope():
        made = how(ours)
    np.testing.assert_array_equal(
        np.concatenate([w.ravel() for w in made.get_weights()]), np.concatenate([w.ravel() for w in ours.get_weights()])
    )
    for model in (expected, made):
        fit(model)
    assert largest_difference(expected, made) <= 1e-6
    assert largest_difference(made, ours) > 1e-3
    assert_pipelined(made, 2)
    assert_same_optimizer(expected, made)


# --- calls without state, frozen layers, layers that come and go ---


def test_stateless_call(trained):
    plain, ours = trained

    def call(model: keras.Model, scale: float) -> tf.Tensor:
        values = [v.value * scale for v in model.trainable_variables]
        y, rest = model.stateless_call(values, [v.value for v in model.non_trainable_variables], X, training=True)
        assert rest == []
        return y

    before = ours.get_weights()
    for scale in (1.0, 0.5):
        expected = call(plain, scale)
        np.testing.assert_allclose(call(ours, scale), expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(ours.distribute_strategy.run(call, (ours, scale)), expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(call(ours, 1.0), ours.predict(X, verbose=0), rtol=0, atol=1e-6)
    assert all(np.array_equal(a, b) for a, b in zip(before, ours.get_weights(), strict=True))


def test_the_tree_of_all_state_is_that_of_plain_keras():
    plain, ours = both()
    trees = [model.get_state_tree(value_format="numpy_array") for model in (plain, ours)]
    keras.tree.assert_same_structure(*trees)
    assert set(trees[1]) >= {"trainable_variables", "non_trainable_variables", "optimizer_variables"}
    fit(ours)
    assert largest_difference(plain, ours) > 1e-3
    homes = [v.value.device for v in (*ours.weights, *ours.optimizer.variables)]
    ours.set_state_tree(trees[0])
    assert largest_difference(plain, ours) == 0.0
    assert_same_optimizer(plain, ours, tolerance=0.0)
    assert [v.value.device for v in (*ours.weights, *ours.optimizer.variables)] == homes
    for model in (plain, ours):
        fit(model)
    assert largest_difference(plain, ours) <= 1e-6


@pytest.mark.parametrize("again", [False, True], ids=["as it is", "compiled again"])
def test_layers_are_frozen_and_thawed(again):
    models = both(nested, NESTED)
    for model in models:
        strategy = model.distribute_strategy if model is models[1] else None
        for frozen in (["inner"], ["late", "p"], []):
            for layer in model.layers:
                layer.trainable = layer.name not in frozen
            held = [[w.copy() for w in model.get_layer(name).get_weights()] for name in frozen]
            if again:
                with scope_of(strategy):
                    model.compile(sgd(), "mse")
            fit(model, NESTED)
            for name, weights in zip(frozen, held, strict=True):
                for a, b in zip(weights, model.get_layer(name).get_weights(), strict=True):
                    assert np.array_equal(a, b) is again
    assert largest_difference(*models) <= 1e-6
    assert [w.path for w in models[0].trainable_weights] == [w.path for w in models[1].trainable_weights]


def test_layers_are_added_to_and_taken_from_a_trained_model():
    models = both()
    for model in models:
        with scope_of(model.distribute_strategy if model is models[1] else None):
            keras.utils.set_random_seed(4)
            model.pop()
            model.add(layers.Dense(5, "tanh", name="more"))
            model.add(layers.Dense(1, name="last"))
            model.compile(sgd(), "mse")
        losses = fit(model, epochs=2)
        assert losses[1] < losses[0]
    assert [layer.name for layer in models[1].layers] == ["one", "two", "more", "last"]
    assert_pipelined(models[1], 2)
    assert largest_difference(*models) <= 1e-6


# --- exports ---

SERVE = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np, tensorflow as tf

folder = sys.argv[1]
assert len(tf.config.list_logical_devices()) == 1
data = np.load(folder + "/data.npz")
x, z = tf.constant(data["x"]), tf.constant(data["z"])
results = {}
exported = tf.saved_model.load(folder + "/exported")
results.update({"export " + key: value for key, value in exported.serve({"x": x, "z": z}).items()})
results.update({"one " + key: value for key, value in exported.serve({"x": x[:1], "z": z[:1]}).items()})
archive = tf.saved_model.load(folder + "/archive")
results.update({"archive " + key: value for key, value in archive.predict({"x": x, "z": z}).items()})
results["archive hidden"] = archive.hidden(x)
saved = tf.saved_model.load(folder + "/saved")
results.update({"saved " + key: value for key, value in saved.signatures["serving_default"](x=x, z=z).items()})
assert "tf_gpipe" not in sys.modules
np.savez(folder + "/results.npz", **results)
"""


def test_exports_are_served_without_the_library_on_one_device(tmp_path):
    plain, ours = both(nested, NESTED)
    ours.export(tmp_path / "exported", verbose=False)
    kinds = {"x": tf.TensorSpec([None, 4]), "z": tf.TensorSpec([None, 3])}
    archive = keras.export.ExportArchive()
    archive.track(ours)
    archive.add_endpoint("predict", ours.call, input_signature=[kinds])
    archive.add_endpoint("hidden", lambda x: ours.get_layer("inner")(x), input_signature=[kinds["x"]])
    archive.add_variable_collection("slots", ours.optimizer.variables)
    archive.write_out(tmp_path / "archive", verbose=False)

    @tf.function(input_signature=[kinds["x"], kinds["z"]])
    def serve(x: tf.Tensor, z: tf.Tensor) -> dict[str, tf.Tensor]:
        return ours({"x": x, "z": z})

    tf.saved_model.save(ours, str(tmp_path / "saved"), signatures=serve)
    np.savez(tmp_path / "data.npz", x=X, z=Z)
    done = subprocess.run(
        [sys.executable, "-c", SERVE, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = np.load(tmp_path / "results.npz")
    expected = plain.predict(NESTED[0], verbose=0)
    assert len(results.files) == 9
    for name in ("export", "archive", "saved"):
        for key in ("p", "q"):
            np.testing.assert_allclose(results[f"{name} {key}"], expected[key], rtol=0, atol=1e-6)
    np.testing.assert_allclose(results["one q"], expected["q"][:1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        results["archive hidden"], plain.get_layer("inner").predict(X, verbose=0), rtol=0, atol=1e-6
    )
    fit(ours, NESTED), fit(plain, NESTED)  # a model that was exported goes on
    assert largest_difference(plain, ours) <= 1e-6


def test_an_export_has_the_signature_and_variables_of_plain_keras(tmp_path, trained):
    found = []
    for name, model in zip(("plain", "ours"), trained, strict=True):
        model.export(tmp_path / name, verbose=False)
        loaded = tf.saved_model.load(tmp_path / name)
        signature = loaded.signatures["serving_default"]
        found.append(
            (
                signature.structured_input_signature,
                {key: value.shape.as_list() for key, value in signature.structured_outputs.items()},
                [(v.name, v.shape.as_list()) for v in loaded.variables],
                sorted(name for name, _ in tf.train.list_variables(str(tmp_path / name / "variables" / "variables"))),
                sorted(str(path.relative_to(tmp_path / name)) for path in Path(tmp_path / name).rglob("*")),
            )
        )
        assert {v.device[-5:] for v in loaded.variables} == {"CPU:0"}
    assert found[0] == found[1]
    assert len(found[1][2]) == 6
