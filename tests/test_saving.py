"""Saved files are those of plain Keras; training goes on from them under another K, or without the library at all."""

import contextlib
import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same_optimizer, largest_difference, normal, scope_of

import tf_gpipe

ROWS, BATCH = 16, 4
X, Y = normal(ROWS, 4), normal(ROWS, 1, seed=1)


def gpipe(num_stages: int = 2, **arguments) -> tf_gpipe.GPipeStrategy:
    return tf_gpipe.GPipeStrategy(num_stages, **{"num_micro_batches": 3, **arguments})


def chain() -> keras.Model:
    x = keras.Input([4], name="x")
    y = keras.layers.Dense(5, "tanh", name="two")(keras.layers.Dense(6, "tanh", name="one")(x))
    return keras.Model(x, keras.layers.Dense(1, name="three")(y), name="chain")


def adam() -> keras.Optimizer:
    return keras.optimizers.Adam(0.05)


def compiled(strategy=None, make=chain, optimizer=adam, **arguments) -> keras.Model:
    keras.backend.clear_session()  # so that names begin anew
    with scope_of(strategy):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(optimizer(), "mse", **arguments)
    return model


def fit(model: keras.Model, epochs: int = 1, **arguments) -> dict:
    arguments = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(X, Y, epochs=epochs, **arguments).history


def devices_of(variables) -> list[str]:
    return [v.value.device[-5:] for v in variables]


other_optimizer = pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")


@pytest.fixture(scope="module")
def trained() -> keras.Model:
    """A plain model after one epoch; its training goes on for another in `uninterrupted`."""
    model = compiled()
    fit(model)
    return model


@pytest.fixture(scope="module")
def uninterrupted() -> keras.Model:
    model = compiled()
    fit(model, epochs=2)
    return model


@pytest.fixture(scope="module")
def pipelined() -> keras.Model:
    """The same, trained in a pipeline of three stages."""
    model = compiled(gpipe(3))
    fit(model)
    return model


# --- the files ---


def content(file: h5py.File | h5py.Group, prefix: str = "") -> list[tuple]:
    """Names in the order in which they were written, with shapes, dtypes and attributes."""
    found = []
    for name in file:
        item, path = file[name], f"{prefix}/{name}"
        attributes = sorted((key, str(value)) for key, value in item.attrs.items())
        if isinstance(item, h5py.Dataset):
            found.append((path, item.shape, str(item.dtype), attributes))
        else:
            found += [(path, attributes), *content(item, path)]
    return found


def values(file: h5py.File) -> dict[str, np.ndarray]:
    found = {}
    file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


def assert_same_weights_file(plain, ours) -> None:
    with h5py.File(plain) as a, h5py.File(ours) as b:
        assert content(a) == content(b)
        assert len(values(a)) >= 6
        assert not any("stage" in str(entry) or "gpipe" in str(entry).lower() for entry in content(b))
        for name, value in values(a).items():
            np.testing.assert_allclose(values(b)[name], value, rtol=0, atol=1e-6, err_msg=name)


def test_a_weights_file_is_that_of_plain_keras(tmp_path, trained, pipelined):
    trained.save_weights(tmp_path / "plain.weights.h5")
    pipelined.save_weights(tmp_path / "ours.weights.h5")
    assert_same_weights_file(tmp_path / "plain.weights.h5", tmp_path / "ours.weights.h5")


@other_optimizer
def test_a_sharded_weights_file_is_that_of_plain_keras(tmp_path, trained, pipelined):
    for model, folder in ((trained, tmp_path / "plain"), (pipelined, tmp_path / "ours")):
        folder.mkdir()
        model.save_weights(folder / "all.weights.json", max_shard_size=2e-7)
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(names) > 2
    fresh = compiled(gpipe(2))
    fresh.load_weights(tmp_path / "ours" / "all.weights.json")
    assert largest_difference(fresh, pipelined) == 0.0


def without_ids(config):
    """A config without the numbers by which it refers to shared objects: they are addresses in memory."""
    if isinstance(config, dict):
        return {key: without_ids(value) for key, value in config.items() if key != "shared_object_id"}
    return [without_ids(value) for value in config] if isinstance(config, list) else config


def test_a_keras_file_is_that_of_plain_keras(tmp_path, trained, pipelined):
    trained.save(tmp_path / "plain.keras")
    pipelined.save(tmp_path / "ours.keras")
    with zipfile.ZipFile(tmp_path / "plain.keras") as plain, zipfile.ZipFile(tmp_path / "ours.keras") as ours:
        assert plain.namelist() == ours.namelist()
        a, b = (json.loads(archive.read("config.json")) for archive in (plain, ours))
        assert without_ids(a) == without_ids(b)
        assert b["compile_config"]["optimizer"]["class_name"] == "Adam"
        assert "gpipe" not in ours.read("config.json").decode().lower()
        for archive in (plain, ours):
            assert "date_saved" in json.loads(archive.read("metadata.json"))
        weights = [io.BytesIO(archive.read("model.weights.h5")) for archive in (plain, ours)]
        assert_same_weights_file(*weights)


def test_a_legacy_h5_file_is_that_of_plain_keras(tmp_path):
    for strategy, name in ((None, "plain.h5"), (gpipe(3), "ours.h5")):
        model = compiled(strategy)
        fit(model)
        with contextlib.redirect_stderr(io.StringIO()):
            model.save(tmp_path / name)
    assert_same_weights_file(tmp_path / "plain.h5", tmp_path / "ours.h5")


def test_names_and_order_of_variables_are_those_of_plain_keras(trained, pipelined):
    for kind in ("weights", "trainable_variables", "non_trainable_variables", "variables", "metrics_variables"):
        names = [v.path for v in getattr(pipelined, kind)]
        assert names == [v.path for v in getattr(trained, kind)], kind
    assert [v.path for v in pipelined.optimizer.variables] == [v.path for v in trained.optimizer.variables]
    assert [v.value.name for v in pipelined.weights] == [v.value.name for v in trained.weights]


# --- weights into other models ---


@other_optimizer
def test_weights_file_between_plain_and_pipelined(tmp_path, trained, pipelined):
    for source, file in ((trained, tmp_path / "plain.weights.h5"), (pipelined, tmp_path / "ours.weights.h5")):
        source.save_weights(file)
        for strategy in (None, gpipe(1), gpipe(2), gpipe(3)):
            model = compiled(strategy)
            model.load_weights(file)
            assert largest_difference(model, source) == 0.0


def test_weights_are_loaded_into_a_placed_model_in_place(tmp_path, pipelined):
    pipelined.save_weights(tmp_path / "w.weights.h5")
    model = compiled(gpipe(3))
    fit(model, epochs=2)
    before, handles = devices_of(model.weights), [v.value.handle for v in model.weights]
    model.load_weights(tmp_path / "w.weights.h5")
    assert devices_of(model.weights) == before
    assert len(set(before)) == 3
    assert all(v.value.handle is handle for v, handle in zip(model.weights, handles, strict=True))
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(pipelined.evaluate(X, Y, verbose=0), abs=0)


def test_get_weights_and_set_weights_keep_the_placement(pipelined):
    model = compiled(gpipe(3))
    fit(model, epochs=2)
    before = devices_of(model.weights)
    model.set_weights(pipelined.get_weights())
    for layer in model.layers:
        layer.set_weights(layer.get_weights())
    assert devices_of(model.weights) == before == devices_of(pipelined.weights)
    assert largest_difference(model, pipelined) == 0.0
    np.testing.assert_array_equal(model.predict(X, verbose=0), pipelined.predict(X, verbose=0))


def test_clone_model(pipelined):
    plain = keras.models.clone_model(pipelined)
    plain.set_weights(pipelined.get_weights())
    assert not isinstance(plain.distribute_strategy, tf_gpipe.GPipeStrategy)
    assert set(devices_of(plain.weights)) == {"CPU:0"}
    np.testing.assert_allclose(plain.predict(X, verbose=0), pipelined.predict(X, verbose=0), rtol=0, atol=1e-6)
    strategy = gpipe(2)
    with strategy.scope():
        clone = keras.models.clone_model(pipelined)
        clone.compile(adam(), "mse")
    clone.set_weights(pipelined.get_weights())
    fit(clone)
    assert clone.distribute_strategy is strategy
    assert devices_of(clone.weights[::2]) in (["CPU:0", "CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:1"])
    assert devices_of(pipelined.weights[::2]) == ["CPU:0", "CPU:1", "CPU:2"]


# --- training goes on ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory, pipelined) -> Path:
    file = tmp_path_factory.mktemp("saved") / "model.keras"
    pipelined.save(file)
    return file


@pytest.mark.parametrize("stages", [None, 1, 2, 3])
def test_training_goes_on_under_another_number_of_stages(saved, uninterrupted, stages):
    strategy = None if stages is None else gpipe(stages)
    with scope_of(strategy):
        model = keras.models.load_model(saved)
    assert int(model.optimizer.iterations) == 4
    fit(model)
    assert int(model.optimizer.iterations) == 8
    assert largest_difference(model, uninterrupted) <= 1e-6
    assert_same_optimizer(uninterrupted, model)


def test_training_goes_on_under_the_same_strategy_exactly(saved):
    whole = compiled(gpipe(3))
    fit(whole, epochs=2)
    with gpipe(3).scope():
        resumed = keras.models.load_model(saved)
    fit(resumed)
    assert largest_difference(whole, resumed) == 0.0
    for a, b in zip(whole.optimizer.variables, resumed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_load_model_in_scope_restores_weights_slots_and_placement(saved, pipelined):
    strategy = gpipe(3)
    with strategy.scope():
        model = keras.models.load_model(saved)
    assert model.distribute_strategy is strategy
    assert largest_difference(model, pipelined) == 0.0
    assert_same_optimizer(pipelined, model, tolerance=0.0)
    strategy.place(model)
    expected = ["CPU:0", "CPU:0", "CPU:1", "CPU:1", "CPU:2", "CPU:2"]
    assert devices_of(model.weights) == expected
    for slot in ("momentum", "velocity"):
        slots = [v for v in model.optimizer.variables if slot in v.path]
        assert devices_of(slots) == expected
    assert largest_difference(model, pipelined) == 0.0
    assert_same_optimizer(pipelined, model, tolerance=0.0)
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(pipelined.evaluate(X, Y, verbose=0), abs=0)


def test_slots_follow_in_every_way_of_starting(saved):
    def evaluate_first(model):
        model.evaluate(X, Y, verbose=0)
        fit(model)

    def predict_first(model):
        model.predict(X, verbose=0)
        fit(model)

    for start in (fit, evaluate_first, predict_first):
        with gpipe(3).scope():
            model = keras.models.load_model(saved)
        start(model)
        velocities = [v for v in model.optimizer.variables if "velocity" in v.path]
        assert devices_of(velocities) == devices_of(model.weights) == [f"CPU:{i}" for i in (0, 0, 1, 1, 2, 2)]


def test_moving_averages_are_saved(tmp_path):
    def make():
        x = keras.Input([4])
        y = keras.layers.BatchNormalization(momentum=0.8)(keras.layers.Dense(6, "tanh")(x))
        return keras.Model(x, keras.layers.Dense(1)(y))

    whole = compiled(gpipe(2), make)
    fit(whole, epochs=2)
    model = compiled(gpipe(2), make)
    fit(model)
    model.save(tmp_path / "m.keras")
    with gpipe(3).scope():
        resumed = keras.models.load_model(tmp_path / "m.keras")
    fit(resumed)
    assert largest_difference(whole, resumed) <= 1e-6


def test_dropout_goes_on_as_in_plain_keras(tmp_path):
    def make():
        x = keras.Input([4])
        y = keras.layers.Dropout(0.4, seed=5)(keras.layers.Dense(6, "tanh")(x))
        return keras.Model(x, keras.layers.Dense(1)(y))

    resumed = []
    for name, strategy in (("plain", None), ("ours", gpipe(2, num_micro_batches=1))):
        model = compiled(strategy, make)
        fit(model)
        model.save(tmp_path / f"{name}.keras")
        with scope_of(strategy):
            resumed.append(keras.models.load_model(tmp_path / f"{name}.keras"))
        fit(resumed[-1])
    assert largest_difference(*resumed) <= 1e-6


def test_an_optimizer_with_averages_and_accumulators_is_saved(tmp_path):
    def adamw():
        return keras.optimizers.AdamW(0.05, use_ema=True, gradient_accumulation_steps=3)

    first = compiled(gpipe(3), optimizer=adamw)
    fit(first)
    first.save(tmp_path / "first.keras")
    with gpipe(2).scope():
        second = keras.models.load_model(tmp_path / "first.keras")
    fit(second)
    second.save(tmp_path / "second.keras")
    third = keras.models.load_model(tmp_path / "second.keras")
    fit(third)
    parts = compiled(optimizer=adamw)  # in three parts too: averages take the weights' place at the end of each `fit`
    for _ in range(3):
        fit(parts)
    assert largest_difference(third, parts) <= 1e-6
    assert_same_optimizer(parts, third)


LOAD_PLAINLY = """
import os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
sys.modules["tf_gpipe"] = None  # an import of it fails
import keras, numpy as np, tensorflow as tf

folder = sys.argv[1]
data = np.load(folder + "/data.npz")
model = keras.models.load_model(folder + "/model.keras")
exported = tf.saved_model.load(folder + "/exported")
results = {
    "keras": model.predict(data["x"], verbose=0),
    "exported": exported.serve(data["x"]).numpy(),
    "one row": exported.serve(data["x"][:1]).numpy(),
    "layer": keras.layers.TFSMLayer(folder + "/exported", call_endpoint="serve")(data["x"]).numpy(),
    "signature": next(iter(exported.signatures["serving_default"](tf.constant(data["x"])).values())).numpy(),
}
model.fit(data["x"], data["y"], batch_size=4, shuffle=False, verbose=0)
results["resumed"] = model.predict(data["x"], verbose=0)
try:
    import tf_gpipe
except ImportError:
    np.savez(folder + "/results.npz", **results)
"""


def test_files_are_used_in_a_process_without_the_library(tmp_path, pipelined, uninterrupted):
    pipelined.save(tmp_path / "model.keras")
    pipelined.export(tmp_path / "exported", verbose=False)
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_PLAINLY, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    results = np.load(tmp_path / "results.npz")
    expected = pipelined.predict(X, verbose=0)
    assert len(results.files) == 6
    for name in ("keras", "exported", "layer", "signature"):
        np.testing.assert_allclose(results[name], expected, rtol=0, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(results["one row"], expected[:1], rtol=0, atol=1e-6)
    np.testing.assert_allclose(results["resumed"], uninterrupted.predict(X, verbose=0), rtol=0, atol=1e-6)


def test_an_export_is_a_plain_graph(tmp_path, pipelined):
    pipelined.export(tmp_path / "exported", verbose=False)
    graph = tf.saved_model.load(tmp_path / "exported").signatures["serving_default"].graph
    nodes = [*graph.as_graph_def().node, *(n for f in graph.as_graph_def().library.function for n in f.node_def)]
    assert sum(node.op == "MatMul" for node in nodes) == 3, "no micro-batches"
    assert not any("stage_" in node.name or node.op == "RemoteCall" for node in nodes)
    assert pipelined.optimizer is not None
    fit_again = compiled(gpipe(2))
    fit_again.export(tmp_path / "untrained", verbose=False)
    fit(fit_again)


# --- checkpoints of TensorFlow and callbacks of Keras ---


@pytest.mark.parametrize("stages", [None, 2, 3])
def test_tf_train_checkpoint(tmp_path, pipelined, uninterrupted, stages):
    path = tf.train.Checkpoint(model=pipelined, optimizer=pipelined.optimizer).save(str(tmp_path / "ckpt"))
    assert not any("stage" in name or "gpipe" in name.lower() for name, _ in tf.train.list_variables(path))
    strategy = None if stages is None else gpipe(stages)
    model = compiled(strategy)
    with scope_of(strategy):
        model.optimizer.build(model.trainable_variables)
    status = tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path)
    status.assert_existing_objects_matched()
    assert largest_difference(model, pipelined) == 0.0
    fit(model)
    assert largest_difference(model, uninterrupted) <= 1e-6
    assert_same_optimizer(uninterrupted, model)


def test_tf_train_checkpoint_into_a_placed_model(tmp_path, pipelined):
    path = tf.train.Checkpoint(model=pipelined, optimizer=pipelined.optimizer).save(str(tmp_path / "ckpt"))
    model = compiled(gpipe(3))
    fit(model, epochs=2)
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).restore(path).assert_existing_objects_matched()
    assert devices_of(model.weights) == devices_of(pipelined.weights)
    assert largest_difference(model, pipelined) == 0.0
    assert_same_optimizer(pipelined, model, tolerance=0.0)


def test_checkpoint_manager(tmp_path, uninterrupted):
    model = compiled(gpipe(2))
    fit(model, epochs=0)  # builds the optimizer
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=model.optimizer), tmp_path, 2)
    for _ in range(3):
        fit(model)
        manager.save()
    assert len(manager.checkpoints) == 2
    manager.checkpoint.restore(manager.checkpoints[0])
    assert largest_difference(model, uninterrupted) <= 1e-6


@other_optimizer
def test_model_checkpoint_saves_the_best_weights(tmp_path):
    values = []
    for name, strategy in (("plain", None), ("ours", gpipe(2))):
        model = compiled(strategy, optimizer=lambda: keras.optimizers.SGD(0.3))
        file = tmp_path / f"{name}.weights.h5"
        saver = keras.callbacks.ModelCheckpoint(
            file, monitor="val_loss", save_best_only=True, save_weights_only=True, mode="min"
        )
        history = fit(model, epochs=5, callbacks=[saver], validation_data=(X[::-1], Y))
        assert saver.best == min(history["val_loss"])
        best = compiled(gpipe(3) if strategy is None else None)
        best.load_weights(file)
        assert best.evaluate(X[::-1], Y, verbose=0) == pytest.approx(saver.best, abs=1e-6)
        values.append(history["val_loss"])
    assert_same_weights_file(tmp_path / "plain.weights.h5", tmp_path / "ours.weights.h5")
    np.testing.assert_allclose(values[1], values[0], rtol=0, atol=1e-6)


def test_model_checkpoint_of_whole_models_each_epoch(tmp_path, pipelined, uninterrupted):
    model = compiled(gpipe(3))
    fit(model, epochs=2, callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}-{loss:.2f}.keras")])
    first, second = sorted(tmp_path.iterdir())
    loaded = keras.models.load_model(first)
    assert largest_difference(loaded, pipelined) == 0.0
    assert_same_optimizer(pipelined, loaded, tolerance=0.0)
    assert largest_difference(keras.models.load_model(second), uninterrupted) <= 1e-6


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_save_frequency_counts_batches(tmp_path, at_once):
    saved = []
    for name, strategy in (("plain", None), ("ours", gpipe(2))):
        folder = tmp_path / name
        folder.mkdir()
        model = compiled(strategy, steps_per_execution=at_once)
        saver = keras.callbacks.ModelCheckpoint(
            folder / "{epoch}-{batch}.weights.h5", save_freq=4, save_weights_only=True
        )
        fit(model, epochs=2, batch_size=2, callbacks=[saver])
        saved.append(sorted(path.name for path in folder.iterdir()))
    assert saved[0] == saved[1]
    assert len(saved[1]) == {1: 4, 2: 4, 3: 3}[at_once]
    for name in saved[0]:
        assert_same_weights_file(tmp_path / "plain" / name, tmp_path / "ours" / name)


class Crash(keras.callbacks.Callback):
    """Interrupts training in the second epoch, as a lost machine would."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 6:
            raise RuntimeError("interrupted")


@pytest.mark.parametrize("stages", [2, 3])
def test_backup_and_restore(tmp_path, stages):
    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup")

    whole = compiled(gpipe(stages))
    history = fit(whole, epochs=3)
    model = compiled(gpipe(stages))
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(model, epochs=3, callbacks=[backup(), Crash()])
    assert "__call__" not in vars(keras.Model)
    resumed = compiled(gpipe(stages))
    rest = fit(resumed, epochs=3, callbacks=[backup()])
    assert rest["loss"] == history["loss"][1:]
    assert largest_difference(resumed, whole) == 0.0
    assert int(resumed.optimizer.iterations) == 12
    for a, b in zip(whole.optimizer.variables, resumed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert devices_of(resumed.weights) == devices_of(whole.weights)


def test_backup_in_the_middle_of_an_epoch(tmp_path):
    plain = compiled()
    fit(plain, epochs=2)
    model = compiled(gpipe(2))
    with pytest.raises(RuntimeError, match="interrupted"):
        fit(model, epochs=2, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2), Crash()])
    resumed = compiled(gpipe(3))
    seen = []
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: seen.append(epoch))
    fit(resumed, epochs=2, callbacks=[keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2), watch])
    assert seen == [1]
    assert int(resumed.optimizer.iterations) == 10, "it goes on after batch 6 and does the whole second epoch"


# --- other models ---


def test_a_subclassed_model_is_saved_and_goes_on(tmp_path):
    plain = compiled(None, Own)
    fit(plain, epochs=2)
    model = compiled(gpipe(2), Own)
    fit(model)
    model.save(tmp_path / "own.keras")
    with gpipe(2).scope():
        resumed = keras.models.load_model(tmp_path / "own.keras")
    fit(resumed)
    assert largest_difference(resumed, plain) <= 1e-6
    model.save_weights(tmp_path / "own.weights.h5")
    fit(plain_start := compiled(None, Own))
    plain_start.save_weights(tmp_path / "plain.weights.h5")
    assert_same_weights_file(tmp_path / "plain.weights.h5", tmp_path / "own.weights.h5")


@keras.saving.register_keras_serializable("test_saving")
class Own(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = keras.layers.Dense(5, "tanh")
        self.second = keras.layers.Dense(1)

    def call(self, x):
        return self.second(self.first(x))


def test_a_model_without_input_is_saved(tmp_path):
    def make():
        return keras.Sequential([keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])

    model = compiled(gpipe(2), make)
    fit(model)
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=0, atol=1e-6)


def test_a_strategy_is_never_part_of_a_config(pipelined):
    text = json.dumps([pipelined.get_config(), pipelined.get_compile_config(), pipelined.to_json()])
    assert "gpipe" not in text.lower()
    assert text == json.dumps([pipelined.get_config(), pipelined.get_compile_config(), pipelined.to_json()])


def test_a_function_that_calls_the_pipeline_can_be_saved_and_loaded(tmp_path):
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(2)])
    strategy.place(model)

    class Served(tf.Module):
        def __init__(self):
            super().__init__()
            self.weights = [weight.value for weight in model.weights]

        @tf.function(input_signature=[tf.TensorSpec([4, 4])])
        def serve(self, x):
            return strategy.run(lambda x: model(x, training=False), (x,))

    served, x = Served(), tf.reshape(tf.range(16.0), [4, 4])
    wanted = served.serve(x)
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(served, str(tmp_path), options=options)
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_array_equal(loaded.serve(x), wanted)
