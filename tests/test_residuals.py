"""What is kept for a backward pass, and what is made again."""

import keras
import numpy as np
import pytest
from helpers import scope_of

import tf_gpipe


def trained(strategy, pooling, rows=12):
    keras.utils.set_random_seed(4)
    with scope_of(strategy):
        inputs = keras.Input([8, 8, 2])
        x = keras.layers.Conv2D(3, 3, activation="relu", padding="same")(inputs)
        x = keras.layers.Conv2D(4, 3)(pooling(x))
        model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(x)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
    generator = np.random.default_rng(5)
    x = generator.normal(size=[rows, 8, 8, 2]).round(1).astype("float32")  # with ties
    model.fit(x, generator.normal(size=[rows, 2]), batch_size=rows, epochs=2, verbose=0)
    return model


@pytest.mark.parametrize(
    "pooling",
    [
        lambda: keras.layers.MaxPooling2D(2),
        lambda: keras.layers.MaxPooling2D(3, strides=1, padding="same"),
    ],
    ids=["disjoint", "overlapping"],
)
def test_what_a_max_pooling_gave_is_made_again(pooling):
    strategy = tf_gpipe.GPipeStrategy(2, 3, remat="never", partition=[4, 1])
    wanted, found = trained(None, pooling()), trained(strategy, pooling())
    for a, b in zip(wanted.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)
    (pipeline,) = vars(found)["_gpipe_pipelines"][strategy].values()
    (recorded,) = pipeline.stages[0]._recorded.values()
    assert recorded._residuals.kept
    assert all(tensor.op.type != "MaxPool" for tensor in recorded._residuals.kept)
    assert any(tensor.op.type == "Relu" for tensor in recorded._residuals.kept)
    assert [op.type for _, _, op in recorded._residuals.pooled] == ["MaxPool"]
