"""Plans: which stage runs what, the table, the stages as Keras models, and what operations cost."""

import keras
import numpy as np
import pytest
from helpers import normal
from keras import layers, ops

import tf_gpipe
from tf_gpipe import costs, model_graph
from tf_gpipe.plan import follow, make_plan

CPUS = [f"/job:localhost/replica:0/task:0/device:CPU:{k}" for k in range(8)]


def small():
    return keras.Sequential(
        [
            keras.Input([8], name="x"),
            layers.Dense(16, "tanh", name="a"),
            layers.Dense(16, "tanh", name="b"),
            layers.Dense(1, name="c"),
        ],
        name="small",
    )


def with_skip():
    x = keras.Input([4], name="x")
    y = a = layers.Dense(5, "tanh", name="a")(x)
    for name in "bcd":
        y = layers.Dense(5, "tanh", name=name)(y)
    y = layers.Add(name="add")([y, a])
    return keras.Model(x, {"y": layers.Dense(2, name="y")(y), "z": layers.Dense(3, name="z")(a)}, name="with_skip")


def nested():
    inner = keras.Sequential([keras.Input([4]), layers.Dense(4, name="a"), layers.Dense(4, name="b")], name="inner")
    x = keras.Input([4])
    y = inner(x)
    encoder = keras.Model(x, layers.Dense(4, name="c")(y), name="encoder")
    x = keras.Input([4])
    return keras.Model(x, layers.Dense(1, name="head")(layers.Dense(4, name="c")(encoder(x))), name="nested")


def plan_of(model, num_stages, partition="flops"):
    return tf_gpipe.GPipeStrategy(num_stages, 1, partition=partition).plan(model)


def operations(plan):
    return [stage.operations for stage in plan.stages]


# --- the table ---


def test_the_table():
    assert str(plan_of(small(), 3)) == "\n".join(
        [
            "stage  device  operations  from  to  parameters  FLOPs/row   share  received/row",
            "────────────────────────────────────────────────────────────────────────────────",
            "    0  CPU:0            1  a     a          144       272   32.7 %",
            "    1  CPU:1            1  b     b          272       528   63.4 %          64 B",
            "    2  CPU:2            1  c     c           17        33    4.0 %          64 B",
            "3 operations of 'small', balance 0.53",
            "made outside this strategy's scope: the model itself trains on one device",
        ]
    )


def test_the_table_of_a_model_of_the_scope_has_no_note():
    with tf_gpipe.GPipeStrategy(3, 1).scope() as strategy:
        model = small()
    assert str(strategy.plan(model)).endswith("\n3 operations of 'small', balance 0.53")


def test_the_table_of_a_model_of_another_strategy_says_so():
    with tf_gpipe.GPipeStrategy(3, 1).scope():
        model = small()
    note = str(tf_gpipe.GPipeStrategy(2, 1).plan(model)).splitlines()[-1]
    assert note.endswith("the model itself trains under the strategy of its own scope (GPipeStrategy)")


def test_the_table_shortens_large_numbers():
    model = keras.Sequential([keras.Input([1000, 500]), layers.Dense(900, name="a"), layers.Dense(1000, name="b")])
    lines = str(plan_of(model, 2)).splitlines()
    assert "450,900      901 M  33.3 %" in lines[2]  # 1000 x (2 x 500 x 900 + 900)
    assert "901,000      1.8 G  66.7 %" in lines[3]
    assert lines[3].endswith("  3.6 MB")


def test_the_table_of_a_model_that_computes_nothing():
    x = keras.Input([0])
    model = keras.Model(x, layers.Activation("relu")(layers.Activation("relu")(x)))
    assert "balance 1.00" in str(plan_of(model, 2))


# --- partitions ---


def test_flops_balance_a_known_model():
    # FLOPs a row: 272, 528, 528, 528, 33; the best heaviest stage is 800, and [2, 3] has 1089.
    widths = [16, 16, 16, 16, 1]
    model = keras.Sequential([keras.Input([8]), *(layers.Dense(w, name=f"d{i}") for i, w in enumerate(widths))])
    plan = plan_of(model, 3)
    assert operations(plan) == [["d0", "d1"], ["d2"], ["d3", "d4"]]
    assert [stage.flops for stage in plan.stages] == [800, 528, 561]


def test_equally_balanced_cuts_send_least():
    x = keras.Input([4])
    y = layers.Dense(4, name="a", use_bias=False)(x)  # 36 FLOPs
    y = layers.Reshape([1, 4], name="reshape")(y)  # 4
    y = layers.UpSampling1D(1, name="same")(y)  # 4
    y = layers.Dense(4, name="b", use_bias=False)(y)  # 36
    assert operations(plan_of(keras.Model(x, y), 2)) == [["a", "reshape"], ["same", "b"]]


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ([1, 1, 3], [["encoder/inner/a"], ["encoder/inner/b"], ["encoder/c", "c", "head"]]),
        (["encoder/inner/b", "head"], [["encoder/inner/a"], ["encoder/inner/b", "encoder/c", "c"], ["head"]]),
        (["inner/b", "encoder/c"], [["encoder/inner/a"], ["encoder/inner/b"], ["encoder/c", "c", "head"]]),
        (("b", "c"), [["encoder/inner/a"], ["encoder/inner/b", "encoder/c"], ["c", "head"]]),
    ],
)
def test_explicit_partitions(partition, expected):
    assert operations(plan_of(nested(), 3, partition)) == expected


def test_a_nested_models_name_stands_for_its_first_operation():
    base = keras.Sequential([keras.Input([4]), layers.Dense(4, name="a"), layers.Dense(4, name="b")], name="base")
    model = keras.Sequential([keras.Input([4]), layers.Dense(4, name="stem"), base, layers.Dense(4, name="head")])
    assert operations(plan_of(model, 2, ["base"])) == [["stem"], ["base/a", "base/b", "head"]]


def test_every_stage_knows_its_device_and_place():
    plan = plan_of(small(), 3)
    assert [stage.device for stage in plan.stages] == CPUS[:3]
    assert [(stage.index, stage.start, stage.end) for stage in plan.stages] == [(0, 0, 1), (1, 1, 2), (2, 2, 3)]
    assert [stage.parameters for stage in plan.stages] == [144, 272, 17]


def test_planning_moves_nothing_and_place_does():
    strategy = tf_gpipe.GPipeStrategy(3, 1)
    with strategy.scope():
        model = small()
    before = [(id(v), v.value.device) for v in model.variables]
    strategy.plan(model)
    assert [(id(v), v.value.device) for v in model.variables] == before
    strategy.place(model)
    assert [id(v) for v in model.variables] == [identity for identity, _ in before]
    assert [v.value.device for v in model.variables] == [CPUS[k] for k in (0, 0, 1, 1, 2, 2)]


# --- boundaries ---


def test_boundary_tensors_of_a_chain():
    plan = plan_of(small(), 3)
    first, second, third = plan.stages
    assert first.inputs == plan.graph.inputs
    assert first.outputs == second.inputs
    assert second.outputs == third.inputs
    assert third.outputs == plan.graph.flat_outputs
    assert [plan.graph.specs[ref].shape for stage in plan.stages for ref in stage.inputs] == [
        (None, 8),
        (None, 16),
        (None, 16),
    ]
    assert [stage.received_bytes for stage in plan.stages] == [0, 64, 64]


def test_boundary_tensors_of_a_skip():
    plan = plan_of(with_skip(), 4, ["b", "c", "add"])
    made_by = {ref: step.name for step in plan.graph.steps for ref in step.outputs}
    names = [([made_by.get(r, "x") for r in s.inputs], [made_by[r] for r in s.outputs]) for s in plan.stages]
    assert names[0][0] == ["x"]
    assert names[1] == (["a"], ["b"])
    assert names[2][0] == ["b"]
    assert set(names[3][0]) == {"d", "a"}
    assert set(names[3][1]) | set(names[0][1]) | set(names[1][1]) | set(names[2][1]) >= {"y", "z"}
    assert plan.stages[3].received_bytes == 2 * 5 * 4


def test_what_crosses_each_cut():
    graph = model_graph.build(with_skip())
    crossing = dict(zip(graph.names, costs.boundary_bytes(graph), strict=True))
    assert crossing["a"] == 0
    assert crossing["b"] == 20
    assert crossing["c"] == 40
    assert crossing["add"] == 40


# --- stages as Keras models ---


def chained(plan, values):
    """Runs the stages' models one after the other on tensors by ref; returns the model's flat outputs."""
    for stage in plan.stages:
        given = [values[ref] for ref in stage.inputs]
        made = stage.model(given[0] if len(given) == 1 else given)
        values.update(zip(stage.outputs, [made] if len(stage.outputs) == 1 else made, strict=True))
    return [values[ref] for ref in plan.graph.flat_outputs]


@pytest.mark.parametrize("make", [small, with_skip, nested])
def test_stages_chained_are_the_model(make):
    model = make()
    x = normal(6, model.inputs[0].shape[1])
    plan = plan_of(model, 3)
    for stage in plan.stages:
        assert isinstance(stage.model, keras.Model)
    received = chained(plan, {plan.graph.inputs[0]: ops.convert_to_tensor(x)})
    expected = keras.tree.flatten(model(x))
    assert len(received) == len(expected)
    for a, b in zip(expected, received, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-6, atol=1e-7)


def test_a_simple_chain_of_stages_is_a_sequential_model():
    model = small()
    plan = plan_of(model, 3)
    together = keras.Sequential([stage.model for stage in plan.stages])
    x = normal(6, 8)
    np.testing.assert_allclose(together(x), model(x), rtol=1e-6, atol=1e-7)


def test_stages_share_their_layers_with_the_model():
    model = small()
    plan = plan_of(model, 3)
    assert [stage.model.layers[-1] for stage in plan.stages] == model.layers
    x = normal(6, 8)
    before = np.array(plan.stages[0].model(x))
    model.set_weights([2 * w for w in model.get_weights()])
    assert not np.allclose(before, plan.stages[0].model(x))
    assert [id(w) for stage in plan.stages for w in stage.model.weights] == [id(w) for w in model.weights]


def test_the_summary_of_a_stage():
    plan = plan_of(with_skip(), 4, ["b", "c", "add"])
    lines = []
    plan.stages[3].model.summary(print_fn=lines.append)
    text = "\n".join(lines)
    assert "with_skip_stage_3" in text
    assert "add" in text
    assert "Total params: 30" in text  # add, y and z


def test_a_stage_with_integer_inputs_and_a_tied_weight():
    x = keras.Input([3], dtype="int32")
    table = layers.Embedding(5, 4, name="table")
    y = layers.Dense(4, name="dense")(table(x))
    model = keras.Model(x, ops.matmul(y, ops.transpose(table(x), [0, 2, 1])))
    plan = plan_of(model, 3, [1, 1, 3])
    ids = ops.convert_to_tensor(np.array([[0, 1, 4], [2, 2, 3]], "int32"))
    (received,) = chained(plan, {plan.graph.inputs[0]: ids})
    np.testing.assert_allclose(received, model(ids), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", [small, with_skip, nested])
def test_making_the_stages_models_leaves_the_model_alone(make, tmp_path):
    model = make()
    x = normal(6, model.inputs[0].shape[1])

    def state():
        lines = []
        model.summary(print_fn=lines.append)
        outputs = [(layer.name, layer.output) for layer in model.layers]
        return "\n".join(lines), [(name, id(output)) for name, output in outputs], model.to_json()

    before, expected = state(), model(x)
    for stage in plan_of(model, 3).stages:
        stage.model(stage.model.inputs)
    assert state() == before
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(keras.tree.flatten(expected), keras.tree.flatten(loaded(x)), strict=True):
        np.testing.assert_array_equal(a, b)
    copy = keras.models.clone_model(model)
    assert [layer.name for layer in copy.layers[1:]] == [layer.name for layer in model.layers[1:]]


# --- costs ---


def cost_of(layer, *shapes, dtype="float32"):
    """Cost of the last operation of a model of one layer; several inputs are passed one by one."""
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    return costs.costs(model_graph.build(keras.Model(inputs, layer(*inputs))))[-1]


def test_cost_of_a_dense_layer():
    assert cost_of(layers.Dense(5), [3]) == costs.Cost(2 * 3 * 5 + 5, 3 * 5 + 5, 5 * 4)


def test_cost_of_a_dense_layer_over_a_sequence():
    assert cost_of(layers.Dense(5), [4, 3]) == costs.Cost(4 * (2 * 3 * 5 + 5), 20, 4 * 5 * 4)


def test_an_unknown_dimension_counts_as_one():
    assert cost_of(layers.Dense(5), [None, 3]).flops == cost_of(layers.Dense(5), [3]).flops


@pytest.mark.parametrize(("strides", "side"), [(1, 8), (2, 4)])
def test_cost_of_a_convolution(strides, side):
    cost = cost_of(layers.Conv2D(4, 3, strides=strides, padding="same"), [8, 8, 2])
    assert cost.flops == side * side * (2 * 3 * 3 * 2 * 4 + 4)
    assert cost.parameters == 3 * 3 * 2 * 4 + 4
    assert cost.output_bytes == side * side * 4 * 4


def test_cost_of_a_depthwise_convolution():
    assert cost_of(layers.DepthwiseConv2D(3, padding="same"), [8, 8, 2]).flops == 64 * (2 * 3 * 3 * 2 + 2)


def test_cost_of_a_transposed_convolution():
    # Its kernel is applied at each position of the input.
    cost = cost_of(layers.Conv2DTranspose(4, 3, strides=2, padding="same"), [8, 8, 2])
    assert cost.flops == 64 * 2 * 3 * 3 * 2 * 4 + 256 * 4


def test_cost_of_an_embedding():
    assert cost_of(layers.Embedding(1000, 8), [5], dtype="int32") == costs.Cost(5 * 8, 8000, 5 * 8 * 4)


@pytest.mark.parametrize("tied", [True, False])
def test_cost_of_logits_from_an_embedding(tied):
    table = layers.ReversibleEmbedding(1000, 8, tie_weights=tied)
    tokens = keras.Input([5], dtype="int32")
    x = layers.Dense(8)(table(tokens))
    model = keras.Model(tokens, table(x, reverse=True))
    lookup, _, logits = (cost.flops for cost in costs.costs(model_graph.build(model)))
    assert lookup == 5 * 8
    assert logits == 5 * 2 * 8 * 1000


def test_cost_of_recurrent_layers():
    # Each of 5 time steps multiplies an input of 3 and a state of 4 by the kernels of all gates.
    assert cost_of(layers.LSTM(4), [5, 3]).flops == 5 * 2 * (3 + 4) * 4 * 4 + 4
    assert cost_of(layers.LSTM(4, return_sequences=True), [5, 3]).flops == 5 * 2 * (3 + 4) * 4 * 4 + 20
    assert cost_of(layers.GRU(4), [5, 3]).flops == 5 * 2 * (3 + 4) * 4 * 3 + 4


def test_cost_of_attention():
    # 5 tokens of width 6; 2 heads of width 3: four projections, the scores, and the weighted sum of values.
    projections = 4 * 2 * 5 * 6 * (2 * 3)
    scores_and_sum = 2 * (2 * 5 * 5 * 2 * 3)
    cost = cost_of(layers.MultiHeadAttention(num_heads=2, key_dim=3), [5, 6], [5, 6])
    assert cost.flops == projections + scores_and_sum + 5 * 6
    assert cost.parameters == 4 * 36 + 3 * 6 + 6


def test_cost_of_attention_whose_heads_are_wider_than_its_input():
    cost = cost_of(layers.MultiHeadAttention(num_heads=2, key_dim=8), [5, 6], [5, 6])
    assert cost.flops == 4 * 2 * 5 * 6 * 16 + 2 * (2 * 5 * 5 * 16) + 30


def test_cost_of_a_product_without_weights():
    x = keras.Input([5, 3])
    y = ops.matmul(x, ops.transpose(x, [0, 2, 1]))
    assert costs.costs(model_graph.build(keras.Model(x, y)))[-1].flops == 2 * 25 * 3


def test_cost_of_layers_without_weights():
    assert cost_of(layers.Activation("relu"), [5, 3]) == costs.Cost(15, 0, 60)
    assert cost_of(layers.Dropout(0.5), [5, 3]).parameters == 0


class Reduction(layers.Layer):
    """Halves height and width before most of its work; scales by a matrix of its own."""

    def __init__(self, built: bool) -> None:
        super().__init__()
        self.halve = layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False)
        self.rest = keras.Sequential([layers.ReLU(), layers.Conv2D(4, 1, use_bias=False)])
        self.unused = layers.Dense(7)
        self.made_early = built

    def build(self, input_shape):
        """Builds the layers inside, or leaves them to be built by their first call."""
        self.scale = self.add_weight(shape=(4, 4))
        if self.made_early:
            self.halve.build(input_shape)
            self.rest.build(self.halve.compute_output_shape(input_shape))

    def call(self, x):
        """Returns half the height and width of `x`, and 4 channels."""
        return self.rest(self.halve(x)) @ self.scale


@pytest.mark.parametrize("built", [True, False])
def test_a_layer_made_of_layers_costs_what_they_cost_for_their_own_shapes(built):
    halve = 16 * (2 * 3 * 3 * 2 * 4 + 4)
    rest = 16 * 4 + 16 * (2 * 4 * 4 + 4)
    scale = 64 * 2 * 4 * 4  # where it is applied cannot be known: at most at each position of the input
    assert cost_of(Reduction(built), [8, 8, 2]).flops == halve + rest + scale + 16 * 4


class Tokens(layers.Layer):
    """Embeds tokens and their positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token = layers.Embedding(1000, 8)
        self.position = layers.Embedding(5, 8)

    def call(self, tokens):
        """Returns `(rows, tokens, 8)`."""
        return self.token(tokens) + self.position(ops.arange(5))


def test_an_embedding_inside_a_layer_is_a_lookup():
    assert cost_of(Tokens(), [5], dtype="int32").flops < 5 * 8 * 4


class PerStep(layers.Layer):
    """Wrapped layers, which are built for less than they are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.each = layers.TimeDistributed(layers.Dense(4, use_bias=False))
        self.both = layers.Bidirectional(layers.LSTM(4, return_sequences=True))

    def call(self, x):
        """Returns `(rows, steps, 8)`."""
        return self.both(self.each(x))


def test_wrapped_layers_inside_a_layer_work_at_every_step():
    each = 5 * 2 * 3 * 4 + 20
    both = 2 * (5 * 2 * (4 + 4) * 4 * 4) + 40
    assert cost_of(PerStep(), [5, 3]).flops == each + both + 40


def test_a_layer_inside_that_does_not_tell_its_shapes_counts_at_each_position_of_the_outer_one():
    class Silent(layers.Dense):
        def get_build_config(self):
            raise NotImplementedError

    class Outer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = Silent(4, use_bias=False)

        def call(self, x):
            return self.inner(x)[:, :2]

    assert cost_of(Outer(), [5, 3]).flops == 5 * 2 * 3 * 4 + 2 * 4 + 2 * 4


def test_a_shared_weight_counts_once_and_works_twice():
    x = keras.Input([4])
    shared = layers.Dense(4)
    first, second = costs.costs(model_graph.build(keras.Model(x, shared(shared(x)))))
    assert (first.parameters, second.parameters) == (20, 0)
    assert first.flops == second.flops == 36


# --- the plan of another graph ---


class Branching(keras.Model):
    """Runs one layer more where it trains."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (layers.Dense(4, name=name) for name in "abcd")

    def call(self, x, training=False):
        x = self.b(self.a(x))
        if training:
            x = self.c(x)
        return self.d(x)


def test_follow_keeps_operations_where_they_are():
    model = Branching()
    x = normal(2, 4)
    model(x, training=True)
    training = make_plan(model_graph.build(model, x, training=True), CPUS[:3], ["b", "d"])
    assert operations(training) == [["a"], ["b", "c"], ["d"]]
    other = follow(model_graph.build(model, x, training=False), training)
    assert operations(other) == [["a"], ["b"], ["d"]]
    assert [stage.device for stage in other.stages] == CPUS[:3]


def test_follow_may_leave_a_stage_empty_and_takes_in_new_operations():
    model = Branching()
    x = normal(2, 4)
    model(x, training=True)
    training = make_plan(model_graph.build(model, x, training=True), CPUS[:4], [1, 1, 1, 1])
    other = follow(model_graph.build(model, x, training=False), training)
    assert operations(other) == [["a"], ["b"], [], ["d"]]
    shorter = make_plan(model_graph.build(model, x, training=False), CPUS[:2], ["d"])
    assert operations(follow(model_graph.build(model, x, training=True), shorter)) == [["a", "b", "c"], ["d"]]


def test_the_plan_of_a_subclassed_model_needs_its_inputs():
    model = Branching()
    x = normal(2, 4)
    model(x, training=True)
    with pytest.raises(ValueError, match="Expected the inputs of 'branching.*' to be known"):
        tf_gpipe.GPipeStrategy(2, 1).plan(model)
    assert operations(tf_gpipe.GPipeStrategy(4, 1).plan(model, x)) == [["a"], ["b"], ["c"], ["d"]]


# --- models that share layers ---


def test_a_model_follows_the_variables_that_another_has_placed():
    strategy = tf_gpipe.GPipeStrategy(4, 2)
    with strategy.scope():
        x = keras.Input([6])
        body = [layers.Dense(8, "tanh", name=f"body_{i}") for i in range(4)]
        y = x
        for layer in body:
            y = layer(y)
        first = keras.Model(x, layers.Dense(8, name="head")(y))
        half = keras.Model(x, body[1].output, name="half")
        second = keras.Model(x, layers.Dense(2, name="other")(layers.Activation("relu")(y)))
    placed = strategy.place(first)
    before = [weight.value.device for weight in first.weights]
    assert [stage.operations for stage in placed.stages] == [["body_0", "body_1"], ["body_2"], ["body_3"], ["head"]]
    plan = strategy.place(half)
    assert [stage.operations for stage in plan.stages] == [["body_0", "body_1"], [], [], []]
    assert "2 operations of 'half'" in str(plan)
    plan = strategy.place(second)
    assert [stage.operations[:1] for stage in plan.stages] == [["body_0"], ["body_2"], ["body_3"], []]
    assert plan.stages[2].operations[-1] == "other"
    assert [weight.value.device for weight in first.weights] == before
    assert {weight.value.device for weight in second.layers[-1].weights} == {strategy.devices[2]}


def test_variables_that_cannot_be_followed_stay_where_they_are():
    strategy = tf_gpipe.GPipeStrategy(2, 2)
    with strategy.scope():
        x = keras.Input([6])
        a, b = layers.Dense(6, "tanh", name="a"), layers.Dense(6, "tanh", name="b")
        forwards, backwards = keras.Model(x, b(a(x))), keras.Model(x, a(b(x)))
        for model in (forwards, backwards):
            model.compile("sgd", "mse")
    rows = np.ones([5, 6], "float32")
    forwards.fit(rows, rows, verbose=0)
    before = [weight.value.device for weight in forwards.weights]
    assert before == [strategy.devices[0]] * 2 + [strategy.devices[1]] * 2
    backwards.fit(rows, rows, verbose=0)
    assert [stage.operations for stage in strategy.plan(backwards).stages] == [["b"], ["a"]]
    assert [weight.value.device for weight in forwards.weights] == before
    weights = [w.numpy() for w in forwards.weights]
    forwards.fit(rows, rows, verbose=0)
    of_b_and_a = [*weights[2:], *weights[:2]]
    assert all((new.numpy() != old).any() for new, old in zip(backwards.weights, of_b_and_a, strict=True))


# --- frozen layers ---


def chain(*frozen, count=8, width=16):
    """Dense layers, those at some places frozen; one row is 2 · 16² + 16 FLOPs in each."""
    model = keras.Sequential([keras.Input([width]), *(layers.Dense(width, "relu") for _ in range(count))])
    for i in frozen:
        model.layers[i].trainable = False
    return model


def work(plan):
    """Work of each stage, in forward passes of one layer of a chain."""
    return [stage.work / (2 * 16 * 16 + 16) for stage in plan.stages]


def frozen_plan(model, partition, num_micro_batches=1, remat="never"):
    strategy = tf_gpipe.GPipeStrategy(len(partition), num_micro_batches, partition=partition, remat=remat)
    return strategy.plan(model)


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        ((), [6, 6, 6, 6]),
        ((0, 1, 2, 3), [2, 2, 2 + 3, 6]),  # no gradients of inputs for the first that is trained
        ((0, 1, 2, 3, 4), [2, 2, 1 + 2, 6]),
        ((0, 1, 2, 3, 4, 5, 6), [2, 2, 2, 1 + 2]),
        ((2, 3), [2 + 3, 4, 6, 6]),  # in the middle: no gradients of weights
        ((3, 7), [2 + 3, 3 + 2, 6, 3 + 2]),
        (range(8), [2, 2, 2, 2]),
    ],
)
def test_work_counts_what_is_done_where_layers_are_frozen(frozen, expected):
    assert work(frozen_plan(chain(*frozen), [2, 2, 2, 2])) == expected


@pytest.mark.parametrize(("remat", "again"), [("always", 1.0), ("except_last", 0.75), ("never", 0.0)])
def test_only_a_stage_that_goes_back_runs_forward_again(remat, again):
    plan = frozen_plan(chain(0, 1, 2, 3, 4, 5), [2, 3, 3], 4, remat)
    assert work(plan) == [2, 3, 1 + 2 + 3 + 3 * again]
    assert [stage.goes_back for stage in plan.stages] == [False, False, True]


def test_a_layer_frozen_inside_another_and_a_frozen_variable_count():
    model = nested()
    model.get_layer("encoder").trainable = False
    plan = tf_gpipe.GPipeStrategy(3, 1, partition=["encoder/c", "head"], remat="never").plan(model)
    assert [stage.work for stage in plan.stages] == [2 * 36, 36 + 2 * 36, 3 * 9]
    model = chain()
    model.layers[0].kernel.trainable = model.layers[0].bias.trainable = False
    assert work(frozen_plan(model, [1, 7])) == [1, 2 + 6 * 3]


def test_moving_averages_are_not_frozen_layers():
    model = keras.Sequential([keras.Input([4]), layers.Dense(4), layers.BatchNormalization(scale=False, center=False)])
    model = keras.Sequential([keras.Input([4]), model, layers.Dense(4)])
    assert [stage.work for stage in frozen_plan(model, [2, 1]).stages] == [3 * 40, 3 * 36]


def test_a_branch_of_frozen_layers_goes_forward_only():
    x = keras.Input([16])
    left = layers.Dense(16, trainable=False)(layers.Dense(16, trainable=False)(x))
    y = layers.Dense(16)(layers.Add()([layers.Dense(16)(x), left]))
    model = keras.Model(x, y)  # in this order: frozen, trained, frozen, sum, trained
    assert work(frozen_plan(model, [1, 1, 1, 1, 1])) == [1, 2, 1, 3 * 16 / 528, 3]
    # All that leaves a stage in which something is trained is given a gradient.
    assert work(frozen_plan(model, [2, 1, 2])) == [3, 2, 3 * 16 / 528 + 3]


def test_the_table_tells_shares_of_training():
    lines = str(frozen_plan(chain(0, 1, 2, 3), [4, 4])).splitlines()
    assert "2.11 k  26.7 %" in lines[2]  # 4 of 4 + 2 + 9
    assert "2.11 k  73.3 %" in lines[3]
    assert lines[4].endswith("balance 0.68")


def test_frozen_layers_are_cut_by_what_they_do():
    strategy = tf_gpipe.GPipeStrategy(2, 4, remat="always")
    assert [len(stage.steps) for stage in strategy.plan(chain(*range(7))).stages] == [6, 2]  # 6 and 2 · 1 + 1 + 2
    assert [len(stage.steps) for stage in strategy.plan(chain(*range(8))).stages] == [4, 4]
    assert [len(stage.steps) for stage in strategy.plan(chain()).stages] == [4, 4]
    assert [len(stage.steps) for stage in tf_gpipe.GPipeStrategy(4, 4).plan(chain(*range(6))).stages] == [3, 3, 1, 1]


@pytest.mark.parametrize("train_first", [False, True])
def test_a_plan_tells_what_is_frozen_now_and_placed_variables_stay(train_first):
    strategy = tf_gpipe.GPipeStrategy(2, 2, remat="never")
    with strategy.scope():
        model = chain()
        model.compile("sgd", "mse")
    if train_first:
        model.fit(normal(4, 16), normal(4, 16), verbose=0)
    assert work(strategy.plan(model)) == [12, 12]
    for layer in model.layers[:4]:
        layer.trainable = False
    with strategy.scope():
        model.compile("sgd", "mse")
    assert work(strategy.plan(model)) == ([4, 11] if train_first else [6, 9])
    model.fit(normal(4, 16), normal(4, 16), verbose=0)
    assert work(strategy.plan(model)) == ([4, 11] if train_first else [6, 9])
    for layer in model.layers:
        layer.trainable = True
    with strategy.scope():
        model.compile("sgd", "mse")
    assert sum(work(strategy.plan(model))) == 24
