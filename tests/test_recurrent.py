"""Recurrent layers, attention and masks: states, scores and masks of one stage are used by layers of another."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import assert_same, scope_of, train
from keras import ops
from layer_checks import ROWS, check, floats, tokens

import tf_gpipe

L = keras.layers
SEQUENCE = (5, 3)


def of_sequence(body: Callable[[keras.KerasTensor], Any], shape: tuple[int | None, ...] = SEQUENCE) -> Any:
    def make() -> keras.Model:
        x = keras.Input(shape)
        return keras.Model(x, body(x))

    return make


def padded_sequences(seed: int = 0) -> np.ndarray:
    x = floats(*SEQUENCE, seed=seed)
    x[1, 2:] = x[2, 1:] = x[5, 4:] = 0.0  # micro-batches have unequal numbers of valid steps
    return x


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SimpleRNN"])
def test_a_decoder_starts_from_the_states_of_an_encoder_on_another_stage(kind: str) -> None:
    layer = getattr(L, kind)

    def body(x: keras.KerasTensor) -> Any:
        sequence, *states = layer(4, return_sequences=True, return_state=True, name="encoder")(x)
        decoded, *states = layer(4, return_sequences=True, return_state=True, name="decoder")(
            sequence, initial_state=states
        )
        return [L.Dense(2, name="steps")(decoded), L.Dense(1, name="last")(L.Concatenate()(states + states[:1]))]

    y = [floats(5, 2), floats(1)]
    compile = {"optimizer": keras.optimizers.SGD(0.1), "loss": ["mse", "mae"]}
    _, plan = check(of_sequence(body), (floats(*SEQUENCE), y), compile=lambda: {**compile, "optimizer": "sgd"})
    assert [stage.operations for stage in plan.stages][:2] == [["encoder"], ["decoder"]]
    assert len(plan.stages[1].inputs) == {"LSTM": 3, "GRU": 2, "SimpleRNN": 2}[kind]


def test_states_that_are_an_input_of_the_model_skip_stages() -> None:
    def make() -> keras.Model:
        x, h, c = keras.Input(SEQUENCE), keras.Input([4], name="h"), keras.Input([4], name="c")
        y = L.TimeDistributed(L.Dense(3, "tanh"))(x)
        y, h_1, c_1 = L.LSTM(4, return_state=True, name="lstm")(y, initial_state=[h, c])
        return keras.Model([x, h, c], [L.Dense(2, name="head")(y), h_1, c_1])

    y = [floats(2), floats(4), floats(4, seed=1)]
    check(
        make, ([floats(*SEQUENCE), floats(4), floats(4, seed=2)], y), compile={"optimizer": "sgd", "loss": ["mse"] * 3}
    )


def test_states_of_both_directions_cross_a_cut() -> None:
    def body(x: keras.KerasTensor) -> Any:
        made = L.Bidirectional(L.LSTM(3, return_sequences=True, return_state=True), name="first")(x)
        y = L.Bidirectional(L.LSTM(3, return_sequences=True), "ave", name="second")(made[0], initial_state=made[1:])
        return L.Dense(2)(y)

    _, plan = check(of_sequence(body), (floats(*SEQUENCE), floats(5, 2)))
    assert [len(stage.inputs) for stage in plan.stages] == [1, 5, 1]


def test_bidirectional_merge_modes_with_a_mask() -> None:
    modes = ["sum", "mul", None]  # others: test_layers.py, and below
    names = [f"mode_{mode}" for mode in modes]

    def body(x: keras.KerasTensor) -> Any:
        y = L.Masking()(x)
        made = [L.Bidirectional(L.SimpleRNN(2, return_sequences=True), mode)(y) for mode in modes]
        return {name: Last(name=name)(z) for name, z in zip(names, made, strict=True)}

    y = {name: floats(5, 2, seed=i) for i, name in enumerate(names)}
    n = len(modes)
    check(of_sequence(body), (padded_sequences(), y), partition=[3, n, n], compile=lambda: with_losses(names))


@keras.saving.register_keras_serializable("test_recurrent")
class Last(L.Layer):
    """Two numbers for each step, of one tensor or of the sum of several."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.supports_masking = True

    def build(self, shape: Any) -> None:
        last = shape[0][-1] if isinstance(shape[0], tuple | list) else shape[-1]
        self.kernel = self.add_weight(shape=(last, 2), name="kernel")

    def call(self, x: Any) -> Any:
        return ops.matmul(sum(x) if isinstance(x, list | tuple) else x, self.kernel)

    def compute_mask(self, x: Any, mask: Any = None) -> Any:
        return mask[0] if isinstance(mask, list | tuple) else mask


def test_states_of_a_convolutional_layer_cross_a_cut() -> None:
    def body(x: keras.KerasTensor) -> Any:
        y, *states = L.ConvLSTM2D(2, 3, padding="same", return_sequences=True, return_state=True)(x)
        y = L.ConvLSTM2D(2, 3, padding="same")(y, initial_state=states)
        return L.Dense(1)(L.GlobalAveragePooling2D()(y))

    check(of_sequence(body, (3, 4, 4, 2)), (floats(3, 4, 4, 2), floats(1)))


@keras.saving.register_keras_serializable("test_recurrent")
class PairCell(L.Layer):
    """A cell with two states of different sizes, of which the second counts steps."""

    state_size = (4, 2)
    output_size = 4

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 4), name="kernel")
        self.recurrent = self.add_weight(shape=(4, 4), name="recurrent")

    def call(self, x: Any, states: Any, training: bool | None = None) -> Any:
        h, count = states
        h = ops.tanh(ops.matmul(x, self.kernel) + ops.matmul(h, self.recurrent)) + 0.1 * ops.mean(
            count, axis=-1, keepdims=True
        )
        return h, [h, count + 1.0]

    def get_initial_state(self, batch_size: Any = None) -> Any:
        return [ops.zeros((batch_size, 4)), ops.ones((batch_size, 2))]


def test_a_cell_of_the_users_own() -> None:
    def body(x: keras.KerasTensor) -> Any:
        y, h, count = L.RNN(PairCell(), return_sequences=True, return_state=True)(x)
        y = L.RNN(PairCell(), name="second")(y, initial_state=[h, count])
        return L.Dense(2)(y)

    _, plan = check(of_sequence(body), (floats(*SEQUENCE), floats(2)))
    assert len(plan.stages[1].inputs) == 3


def test_stacked_cells_of_several_kinds_with_a_mask() -> None:
    def body(x: keras.KerasTensor) -> Any:
        cells = [L.LSTMCell(3), PairCell(), L.GRUCell(2, reset_after=False)]
        made = L.RNN(cells, return_sequences=True, return_state=True, zero_output_for_mask=True)(L.Masking()(x))
        return L.Dense(2)(L.RNN([L.GRUCell(3), L.SimpleRNNCell(2)])(made[0]))

    check(of_sequence(body), (padded_sequences(), floats(2)))


def test_dropout_inside_cells_and_in_both_directions() -> None:
    def body(x: keras.KerasTensor) -> Any:
        y = L.RNN([L.LSTMCell(4, dropout=0.4), L.GRUCell(3, recurrent_dropout=0.4)], return_sequences=True)(x)
        y = L.Bidirectional(L.LSTM(3, dropout=0.3, recurrent_dropout=0.3))(y)
        return L.Dense(2)(y)

    check(of_sequence(body), (floats(*SEQUENCE), floats(2)), per_micro_batch=True)


@pytest.mark.parametrize("arguments", [{"unroll": True}, {"go_backwards": True}, {"zero_output_for_mask": True}])
def test_options_of_a_recurrent_layer_with_a_masked_loss(arguments: dict[str, bool]) -> None:
    def body(x: keras.KerasTensor) -> Any:
        y = L.LSTM(3, return_sequences=True, **arguments)(L.Masking()(x))
        return L.Dense(2)(L.GRU(3, return_sequences=True, **arguments)(y))

    check(of_sequence(body), (padded_sequences(), floats(5, 2)))


def test_sequences_whose_length_is_not_known() -> None:
    def body(x: keras.KerasTensor) -> Any:
        y, h, c = L.LSTM(4, return_sequences=True, return_state=True)(L.Masking()(x))
        return L.Dense(2)(L.Bidirectional(L.LSTM(4, return_sequences=True))(y, initial_state=[h, c, h, c]))

    check(of_sequence(body, (None, 3)), (padded_sequences(), floats(5, 2)))


def stateful() -> keras.Model:
    x = keras.Input(batch_shape=(4, *SEQUENCE))
    y = L.GRU(3, stateful=True, return_sequences=True)(x)
    return keras.Model(x, L.Dense(2)(L.LSTM(3, stateful=True)(y)))


def test_with_one_micro_batch_a_stateful_layer_keeps_its_state_from_batch_to_batch() -> None:
    data = floats(*SEQUENCE, rows=12), floats(2, rows=12)
    strategy = tf_gpipe.GPipeStrategy(3, 1, partition=[1, 1, 1])
    plain, piped = (train(stateful, data, s, batch_size=4) for s in (None, strategy))
    assert_same(plain, piped)
    states = [
        [v.numpy() for layer in model.layers if isinstance(layer, L.RNN) for v in keras.tree.flatten(layer.states)]
        for model, _ in (plain, piped)
    ]
    assert len(states[0]) == 3
    for a, b in zip(*states, strict=True):
        assert np.any(a != 0)
        np.testing.assert_allclose(b, a, atol=1e-6)
    predicted = []
    for model, _ in (plain, piped):
        for layer in model.layers:
            if isinstance(layer, L.RNN):
                layer.reset_state()
        predicted.append(model.predict(data[0], batch_size=4, verbose=0))
    np.testing.assert_allclose(*predicted, atol=1e-6)


def test_a_stateful_layer_with_several_micro_batches_is_refused() -> None:
    with tf_gpipe.GPipeStrategy(2, 2).scope():
        model = stateful()
        model.compile("sgd", "mse")
    with pytest.raises(tf_gpipe.GPipeError, match="fixed batch size.*num_micro_batches=1"):
        model.fit(floats(*SEQUENCE, rows=4), floats(2, rows=4), batch_size=4, verbose=0)


def test_time_distributed_over_convolutions_and_a_model_with_a_mask() -> None:
    def body(x: keras.KerasTensor) -> Any:
        inner = keras.Sequential([keras.Input([4, 4, 2]), L.Conv2D(3, 2, activation="tanh"), L.Flatten()])
        y = L.TimeDistributed(inner)(x)
        y = L.LSTM(4, return_sequences=True)(L.Masking(0.0)(y))
        return L.TimeDistributed(L.Dense(2))(y)

    x = floats(3, 4, 4, 2)
    x[2, 1:] = 0.0
    check(of_sequence(body, (3, 4, 4, 2)), (x, floats(3, 2)))


# --- attention -------------------------------------------------------------------------------------------------------


def of_pair(body: Callable[..., Any], *more: tuple[int, ...], dtype: str = "bool") -> Callable[[], keras.Model]:
    """A model with two sequences, queries of 5 and values of 4, each behind a layer with weights, and more inputs."""

    def make() -> keras.Model:
        q, v = keras.Input([5, 3], name="q"), keras.Input([4, 3], name="v")
        rest = [keras.Input(shape, dtype=dtype, name=f"more_{i}") for i, shape in enumerate(more)]
        made = body(L.Dense(4, name="queries")(q), L.Dense(4, name="values")(v), *rest)
        return keras.Model([q, v, *rest], L.Dense(2, name="head")(made))

    return make


QV = [floats(5, 3), floats(4, 3)]
# An attention key's bias shifts all scores of a query alike: its true gradient is zero, so that it need not move.
WITHOUT_BIAS = {"use_bias": False}


def random_mask(*shape: int, seed: int = 0) -> np.ndarray:
    mask = np.random.default_rng(seed).random((ROWS, *shape)) < 0.6
    mask[..., 0] = True
    return mask


@pytest.mark.parametrize("kind", ["MultiHeadAttention", "GroupQueryAttention"])
def test_an_attention_mask_that_is_an_input_goes_to_a_late_stage(kind: str) -> None:
    def body(q: Any, v: Any, mask: Any) -> Any:
        heads = {"num_heads": 2, "key_dim": 3}
        if kind == "GroupQueryAttention":
            heads = {"num_query_heads": 4, "head_dim": 3, "num_key_value_heads": 2}
        y = getattr(L, kind)(**heads, **WITHOUT_BIAS)(q, v, attention_mask=mask)
        return getattr(L, kind)(**heads, **WITHOUT_BIAS)(y, v, attention_mask=mask)

    _, plan = check(of_pair(body, (5, 4)), ([*QV, random_mask(5, 4)], floats(5, 2)))
    assert [plan.graph.inputs[2] in stage.inputs for stage in plan.stages] == [False, False, True, True, False]


def test_an_attention_mask_that_is_computed_crosses_cuts() -> None:
    def body(q: Any, v: Any) -> Any:
        mask = ops.matmul(q, ops.transpose(v, (0, 2, 1))) > -0.5
        y = L.MultiHeadAttention(2, 3, **WITHOUT_BIAS)(q, v, attention_mask=mask)
        return L.MultiHeadAttention(2, 3, **WITHOUT_BIAS)(y, v, attention_mask=mask)

    check(of_pair(body), (QV, floats(5, 2)))


def test_attention_scores_cross_a_cut() -> None:
    def body(q: Any, v: Any) -> Any:
        y, scores = L.MultiHeadAttention(2, 3, **WITHOUT_BIAS)(q, q, return_attention_scores=True, use_causal_mask=True)
        z = L.Attention(use_scale=True)([y, v])
        return L.Concatenate()([z, scores[:, 0]])

    check(of_pair(body), (QV, floats(5, 2)))


@pytest.mark.parametrize("kind", ["Attention", "AdditiveAttention"])
def test_masks_given_to_attention_cross_cuts(kind: str) -> None:
    def body(q: Any, v: Any, q_mask: Any, v_mask: Any) -> Any:
        layer = getattr(L, kind)(use_scale=True)
        y = layer([q, v], mask=[q_mask, v_mask], use_causal_mask=True)
        return getattr(L, kind)()([L.Dense(4)(y), v, q[:, :4]], mask=[q_mask, v_mask])

    check(of_pair(body, (5,), (4,)), ([*QV, random_mask(5), random_mask(4, seed=1)], floats(5, 2)))


@pytest.mark.filterwarnings("ignore:Layer '(query|key|value)' .of type EinsumDense")  # Keras, of GroupQueryAttention
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["MultiHeadAttention", "GroupQueryAttention", "Attention", "AdditiveAttention"])
def test_masks_of_embeddings_reach_attention_and_the_loss(kind: str, causal: bool) -> None:
    def make() -> keras.Model:
        a, b = keras.Input([5], dtype="int32", name="a"), keras.Input([4], dtype="int32", name="b")
        q, v = L.Embedding(6, 4, mask_zero=True)(a), L.Embedding(6, 4, mask_zero=True)(b)
        if kind == "MultiHeadAttention":
            y = L.MultiHeadAttention(2, 3, **WITHOUT_BIAS)(q, v, use_causal_mask=causal)
        elif kind == "GroupQueryAttention":
            y = L.GroupQueryAttention(3, 4, 2, **WITHOUT_BIAS)(q, v, use_causal_mask=causal)
        else:
            y = getattr(L, kind)()([q, v], use_causal_mask=causal)
        return keras.Model([a, b], L.Dense(2)(y))

    x = [tokens(5, padded=True), tokens(4, padded=True, seed=1)]
    model, _ = check(make, (x, floats(5, 2)))
    assert model.outputs[0]._keras_mask is not None  # The loss leaves padded steps out.


def test_dropout_of_attention_scores() -> None:
    def body(q: Any, v: Any) -> Any:
        y = L.MultiHeadAttention(2, 3, dropout=0.4, **WITHOUT_BIAS)(q, v)
        y = L.GroupQueryAttention(3, 4, 2, dropout=0.4, **WITHOUT_BIAS)(y, v)
        return L.AdditiveAttention(dropout=0.4)([L.Attention(dropout=0.4, use_scale=True)([y, v]), v])

    check(of_pair(body), (QV, floats(5, 2)), per_micro_batch=True)


# --- masks -----------------------------------------------------------------------------------------------------------


JOINS: dict[str, Callable[[], keras.Layer]] = {
    "add": L.Add,
    "average": L.Average,
    "maximum": L.Maximum,
    "minimum": L.Minimum,
    "multiply": L.Multiply,
    "subtract": L.Subtract,
    "concatenate": L.Concatenate,
    "concatenate_steps": lambda: L.Concatenate(axis=1),
}


def test_layers_that_join_masked_sequences() -> None:
    def make() -> keras.Model:
        a, b = keras.Input([4], dtype="int32", name="a"), keras.Input([4], dtype="int32", name="b")
        pair = [L.Embedding(6, 3, mask_zero=True)(a), L.Embedding(6, 3, mask_zero=True)(b)]
        joined = {name: layer()(pair) for name, layer in JOINS.items()}
        return keras.Model([a, b], {name: L.Dense(2, name=f"to_{name}")(y) for name, y in joined.items()})

    n = len(JOINS)
    y = {name: floats(8 if "steps" in name else 4, 2, seed=i) for i, name in enumerate(JOINS)}
    data = [tokens(4, padded=True), tokens(4, padded=True, seed=1)], y
    model, plan = check(make, data, partition=[2, n, n], compile=lambda: with_losses(JOINS))
    assert plan.stages[2].operations.count("to_add") == 1
    assert all(name.startswith("to_") for name in plan.stages[2].operations)
    assert all(model.outputs[i]._keras_mask is not None for i in range(n))


def with_losses(names: Iterable[str]) -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": dict.fromkeys(names, "mse")}


def test_a_masked_sequence_and_one_without_mask_are_joined() -> None:
    def make() -> keras.Model:
        a, b = keras.Input([4], dtype="int32", name="a"), keras.Input([4, 3], name="b")
        joined = L.Concatenate()([L.Embedding(6, 3, mask_zero=True)(a), L.Dense(2)(b)])
        return keras.Model([a, b], L.Dense(2)(L.GRU(3, return_sequences=True)(joined)))

    check(make, ([tokens(4, padded=True), floats(4, 3)], floats(4, 2)))


LAYERS: dict[str, Callable[[], keras.Layer]] = {
    "activation": lambda: L.Activation("tanh"),
    "bidirectional": lambda: L.Bidirectional(L.GRU(2, return_sequences=True)),
    "dropout_of_nothing": lambda: L.Dropout(0.0),
    "lambda": lambda: L.Lambda(
        lambda x, mask=None: x * ops.cast(mask, x.dtype)[..., None], (4, 3), mask=lambda x, mask: mask
    ),
    "layer_normalization": lambda: L.LayerNormalization(),
    "time_distributed": lambda: L.TimeDistributed(L.Dense(4, "tanh")),
    "unit_normalization": lambda: L.UnitNormalization(),
    "pooling": lambda: L.GlobalAveragePooling1D(),
}


def test_a_mask_reaches_and_passes_layers_of_the_middle_stage() -> None:
    def make(mask_zero: bool = True) -> keras.Model:
        x = keras.Input([4], dtype="int32")
        y = L.Embedding(6, 3, mask_zero=mask_zero)(x)
        middle = {name: layer()(y) for name, layer in LAYERS.items() if mask_zero or name != "lambda"}
        return keras.Model(x, {name: L.Dense(2, name=f"to_{name}")(z) for name, z in middle.items()})

    n = len(LAYERS)
    y = {name: floats(2) if name == "pooling" else floats(4, 2, seed=i) for i, name in enumerate(LAYERS)}
    data = tokens(4, padded=True), y
    compile = functools.partial(with_losses, LAYERS)
    model, plan = check(make, data, partition=[2, n, n], compile=compile)
    assert plan.stages[2].operations.count("to_lambda") == 1
    assert all(name.startswith("to_") for name in plan.stages[2].operations)
    y.pop("lambda")
    unmasked = train(lambda: make(False), data, compile=lambda: with_losses(y), batch_size=ROWS)[1]
    for name in y:
        assert unmasked[f"{name}_loss"] != model.history.history[f"{name}_loss"], name


def test_a_mask_given_to_softmax_as_a_tensor_of_another_stage() -> None:
    def make() -> keras.Model:
        x = keras.Input([6])
        y = L.Dense(5)(x)
        mask = ops.greater(y, -0.5)
        return keras.Model(x, L.Dense(2)(L.Softmax()(L.Dense(5)(y), mask=mask) * 2.0))

    check(make, (floats(6), floats(2)))


@pytest.mark.filterwarnings("ignore:Layer 'functional")  # Keras: the model's own output has no mask
def test_a_mask_that_the_user_attaches_in_a_call() -> None:
    x = floats(4, 3)
    mask = random_mask(4)
    found = []
    for strategy in (None, tf_gpipe.GPipeStrategy(2, 3, partition=[1, 1])):
        with scope_of(strategy):
            keras.utils.set_random_seed(0)
            inputs = keras.Input([4, 3])
            model = keras.Model(inputs, L.GRU(3)(L.LSTM(3, return_sequences=True)(inputs)))

        def step(model: keras.Model = model) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.constant(x), mask=tf.constant(mask), training=True))
            return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

        found.append(strategy.run(step) if strategy else step())
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=2e-6)
    for a, b in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_allclose(b, a, atol=1e-6)
        assert np.any(a.numpy() != 0)
