"""Where things run: the graphs that TensorFlow executed, device by device, and what it sent between them."""

import collections
import re
import subprocess
import sys
from typing import NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import tf_gpipe

WIDTHS = [24, 25, 26, 27, 28, 29]
ROWS = 8


class Sent(NamedTuple):
    """A tensor that one device sent another."""

    source: str
    target: str
    name: str
    output: int


class Executed:
    """The partitioned graphs of everything that ran in the block."""

    def __init__(self) -> None:
        self.traced: list[tf.Graph] = []

    def __enter__(self) -> "Executed":
        for device in tf.config.list_logical_devices("CPU"):
            with tf.device(device.name):
                tf.zeros([2])  # the first of a process sends the shape to the device
        context.enable_run_metadata()
        context.export_run_metadata()  # forgets what ran before
        return self

    def __exit__(self, *_: object) -> None:
        metadata = context.export_run_metadata()
        context.disable_run_metadata()
        self.graphs = [graph for part in metadata.function_graphs for graph in part.partition_graphs]

    def trace_loss(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Mean squared error, which remembers the graphs it is traced in: that of the training step among them."""
        self.traced.append(tf.compat.v1.get_default_graph())
        return tf.reduce_mean(tf.square(y_true - y_pred), axis=-1)

    @property
    def step(self) -> tf.Graph:
        """The graph of the training step that ran: of those traced, the latest that knows most of what was sent."""
        names = {sent.name for sent in self.sent}
        return max(self.traced[::-1], key=lambda graph: len(names & {op.name for op in graph.get_operations()}))

    def elements(self, sent: Sent) -> int | None:
        """Number of elements of what was sent; 0 for a control edge, None for an unknown batch."""
        if sent.name.startswith("GroupCrossDeviceControlEdges"):
            return 0
        return self.step.get_operation_by_name(sent.name).outputs[sent.output].shape.num_elements()

    def nodes(self, op: str) -> list[tuple[str, str]]:
        """(name, device) of all executed nodes of a type."""
        return [(n.name, short(n.device)) for graph in self.graphs for n in graph.node if n.op == op]

    @property
    def sent(self) -> list[Sent]:
        """Everything that crossed from one device to another."""
        found = []
        for graph in self.graphs:
            for node in graph.node:
                if node.op in ("_Send", "_HostSend"):
                    source, target = (short(node.attr[key].s.decode()) for key in ("send_device", "recv_device"))
                    name = re.sub(r"^edge_\d+_(StatefulPartitionedCall/)?", "", node.attr["tensor_name"].s.decode())
                    output = int(node.input[0].split(":")[1]) if ":" in node.input[0] else 0
                    if source != target and not is_control_edge(node, graph):
                        found.append(Sent(source, target, name, output))
        return found


def is_control_edge(send, graph) -> bool:
    """Whether a _Send carries only that something is done: TensorFlow sends an empty constant then."""
    makers = {node.name: node for node in graph.node}
    maker = makers.get(send.input[0].split(":")[0])
    return maker is not None and maker.op == "Const" and "/ctrl/" in maker.name


def short(device: str) -> str:
    """`CPU:1`."""
    return device.rsplit("device:", 1)[-1]


def train(stages: int = 3, micro_batches: int = 2, regularizer: str | None = None, **optimizer: object) -> tuple:
    """A chain of Dense layers of telling sizes under a strategy; fits one batch and returns what was executed."""
    strategy = tf_gpipe.GPipeStrategy(num_stages=stages, num_micro_batches=micro_batches)
    with strategy.scope():
        layers = [keras.layers.Dense(w, activation="tanh", kernel_regularizer=regularizer) for w in WIDTHS]
        model = keras.Sequential([keras.Input([23]), *layers, keras.layers.Dense(3)])
        executed = Executed()
        model.compile(keras.optimizers.Adam(**optimizer), executed.trace_loss, metrics=["mae"])
    x, y = np.ones([ROWS, 23], "float32"), np.ones([ROWS, 3], "float32")
    with executed:
        model.fit(x, y, batch_size=ROWS, verbose=0)
    return strategy, model, executed


def test_weights_and_slots_stand_on_their_stage():
    strategy, model, _ = train()
    for stage in strategy.plan(model).stages:
        for variable in stage.variables:
            assert variable.value.device == stage.device
    weights = model.trainable_variables
    for name in ("_momentums", "_velocities"):
        for weight, slot in zip(weights, getattr(model.optimizer, name), strict=True):
            assert slot.value.device == weight.value.device, slot.path


def test_stage_functions_are_called_on_their_stage():
    strategy, _, executed = train()
    calls = [n for n in executed.nodes("RemoteCall") if re.search("/(for|back)ward/", n[0])]
    for name, device in calls:
        stage = int(re.search(r"stage_(\d+)/micro_batch_\d+/", name).group(1))
        assert device == short(strategy.devices[stage]), name
    assert len(calls) == 3 * 2 * 2, calls


LOGS_PLACEMENT = """
import keras, numpy as np, tensorflow as tf, tf_gpipe

tf_gpipe.set_logical_cpus(3)
tf.debugging.set_log_device_placement(True)
strategy = tf_gpipe.GPipeStrategy(num_stages=3, num_micro_batches=2, remat="except_last")
with strategy.scope():
    layers = [keras.layers.Dense(4, activation="tanh", name=f"layer{k}") for k in range(3)]
    model = keras.Sequential([keras.Input([4]), *layers])
    model.compile("adam", "mse")
model.fit(np.zeros([8, 4], "float32"), np.zeros([8, 4], "float32"), verbose=0)
"""


def test_every_operation_of_a_layer_runs_on_its_stage():
    """Forward and gradient operations alike: a tape around all stages would put every gradient onto device 0."""
    run = subprocess.run([sys.executable, "-c", LOGS_PLACEMENT], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
    line = r"^(gradient_tape/)?layer(\d)[^ ]*: \((MatMul|TanhGrad|BiasAddGrad)\): .*device:CPU:(\d)"
    placed = re.findall(line, run.stdout + run.stderr, re.M)
    assert {(bool(tape), op) for tape, _, op, _ in placed} >= {(False, "MatMul"), (True, "MatMul"), (True, "TanhGrad")}
    assert {layer for _, layer, _, _ in placed} == {"0", "1", "2"}
    assert [line for line in placed if line[1] != line[3]] == []


def test_stage_functions_are_called_not_inlined():
    """Inlined, Grappler merges each recomputation with the forward pass and nothing is saved."""
    _, _, executed = train()
    backward = [name for name, _ in executed.nodes("RemoteCall") if "/backward/" in name]
    assert len(backward) == 3 * 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"global_clipnorm": 1.0, "use_ema": True, "weight_decay": 0.01},
        {"regularizer": "l2", "clipnorm": 1.0},
        {"regularizer": "l1l2", "clipvalue": 0.5},
    ],
    ids=["plain", "global-norm-ema-decay", "l2-clipnorm", "l1l2-clipvalue"],
)
def test_only_boundary_tensors_labels_and_scalars_cross(options):
    """No weight, gradient of a weight or slot leaves its stage, whatever the optimizer does to it."""
    _, _, executed = train(**options)
    boundary = re.compile(r".*stage_\d+/micro_batch_\d+/(forward|backward)/RemoteCall$")
    labels = [s for s in executed.sent if s.name == "IteratorGetNext"]
    assert [s.target for s in labels] == ["CPU:2"]
    others = [s for s in executed.sent if not boundary.match(s.name) and s not in labels]
    assert [s for s in others if executed.elements(s) not in (0, 1)] == []
    between = collections.Counter((s.source, s.target) for s in executed.sent if boundary.match(s.name))
    assert between == {("CPU:0", "CPU:1"): 2, ("CPU:1", "CPU:2"): 2, ("CPU:2", "CPU:1"): 2, ("CPU:1", "CPU:0"): 2}


def test_an_unplaced_skip_goes_straight_to_its_user():
    """A skip over two cuts is sent once, from the stage that makes it to the stage that uses it."""
    strategy = tf_gpipe.GPipeStrategy(num_stages=4, num_micro_batches=1, partition=[1, 1, 1, 2])
    with strategy.scope():
        inputs = keras.Input([5])
        first = keras.layers.Dense(6, name="first")(inputs)
        x = keras.layers.Dense(7, activation="tanh")(first)
        x = keras.layers.Dense(6, activation="tanh")(x)
        x = keras.layers.Add(name="join")([x, first])
        model = keras.Model(inputs, keras.layers.Dense(2)(x))
        model.compile("sgd", "mse")
    with Executed() as executed:
        model.fit(np.ones([4, 5], "float32"), np.ones([4, 2], "float32"), verbose=0)
    plan = strategy.plan(model)
    skip = next(ref for ref in plan.stages[0].outputs)
    assert [skip in stage.inputs for stage in plan.stages] == [False, True, False, True]
    forward = [s for s in executed.sent if "stage_0/micro_batch_0/forward/" in s.name]
    assert sorted(s.target for s in forward) == ["CPU:1", "CPU:3"]


def test_new_variables_are_made_on_the_host():
    strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=1)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0])
    assert short(variable.device) == "CPU:0"
