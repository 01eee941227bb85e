"""Trains every model of `keras.applications` for one step in four stages, and compares it with plain Keras.

    python tests/compare_applications.py                          all models, one line each
    python tests/compare_applications.py VGG16 DenseNet121        these models
    python tests/compare_applications.py --write                  puts the rows into docs/keras_applications.md too

`--against` chooses one of two comparisons: `micro` trains in float32 with two micro-batches, against a loop of plain
Keras over the same two; `fit` trains in float64, against Keras's own `fit`. Each model runs in a process of its own,
which is ended after `--limit` seconds, so that memory is given back. With `--write`, what is not measured stays in the
table as it was. The exit status is 1 if a model differs or fails.
"""

import argparse
import contextlib
import dataclasses
import gc
import inspect
import json
import os
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe

TABLE = Path(__file__).parents[1] / "docs" / "keras_applications.md"
STAGES, CLASSES, RATE = 4, 10, 0.1
SMALLEST = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
"""Height and width below which Keras refuses to make a model; 32 for all others."""
LARGE = ("ConvNeXtXLarge",)
"""Compared with `fit` in float32, which halves the memory, and so with one micro-batch: with two, sums are taken in
another order, whose rounding in float32 is near the tolerance."""
BAR = 1e-4
"""What float32 may differ by from plain Keras's micro-batches, as a share of the step."""
TOLERANCE = {"float32": 1e-6, "float64": 1e-10}
"""The same for `fit`, which makes the same operations."""
COLUMNS = {
    "model": "the function of `keras.applications`, called with `weights=None` and 10 classes",
    "operations": "steps of the chain that is cut into four stages",
    "parameters": "numbers in the model's weights",
    "devices": "how many devices hold a stage's operations and all of its variables",
    "moved": "how many of the trainable weights one step of SGD(0.1) changed (ConvNeXt scales branches by "
    "1e-6, so that float32 rounds the steps of some biases to nothing)",
    "K=4, M=2 and plain micro-batches": "largest difference of any weight after one step in float32 between four "
    "stages with two micro-batches and a loop of plain Keras over the same two, as a share of the largest step of any "
    f"weight; at most {BAR:.0e}. 4 images of 64x64 (InceptionV3, InceptionResNetV2: 75x75, Xception: 71x71); the rates "
    "of dropout are 0",
    "averages": "the same for the moving averages of batch normalisation, as a share of their largest step; those of "
    "the loop are the averages of both micro-batches, pooled",
    "s": "seconds of processor time that the comparison took, with the making of both models and their tracing",
    "K=4 and fit": "as before, between four stages and plain Keras's `fit`, in float64: with one micro-batch where the "
    "model has batch normalisation or dropout, else with two (ConvNeXtXLarge: float32, one, to halve the memory). 7 "
    "images of the least size that Keras allows, 32x32 for most",
    "averages ": "as above, for this comparison",
    "s ": "as above, for this comparison",
}
HEAD = """# The models of keras.applications

One training step in four stages on four devices, compared with plain Keras. Written by

```bash
python tests/compare_applications.py --write
```

with Keras {keras} and TensorFlow {tensorflow} on logical CPU devices. A dash: not measured. `0`: the same numbers, bit
for bit.

Both sides run without Grappler. What it writes anew depends on what is in one graph, so that it rounds in one way in
plain Keras and in another in a stage. Where the input of a ReLU is that near to a kink, its gradient is there on one
side and not on the other. So it is among ways of running plain Keras: of the 1,993,728 inputs of MobileNetV2's ReLUs,
float32 has 4 on another side of a kink than float64 without Grappler, and 3 with it. One step of plain Keras is then
off the same in float64 by 1.3e-03 of the step without Grappler and by 2.1e-03 with it; of four stages with it, by
1.3e-03. For ResNet50 it is 2.1e-02 both ways, and 1.4e-02.

"""


def names() -> list[str]:
    """The models that this version of Keras has, small ones first."""
    found = [name for name, made in vars(keras.applications).items() if inspect.isfunction(made)]
    slow = ["Large", "V2M", "V2L", "B5", "B6", "B7", "201", "152", "InceptionResNet"]
    return sorted(found, key=lambda name: any(part in name for part in slow))


@dataclasses.dataclass
class Run:
    """What one training step of a freshly made model gave; numbers alone, so that the model can be freed."""

    weights: list[np.ndarray]
    averages: list[np.ndarray]
    initial: int
    loss: float
    step: float
    averages_step: float
    moved: str
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Data:
    """Images and their classes, and whether layers draw nothing, so that both sides see the same."""

    x: np.ndarray
    y: np.ndarray
    without_dropout: bool

    @classmethod
    def of(cls, rows: int, size: int, *, without_dropout: bool) -> "Data":
        """Random images of the default float type."""
        random = np.random.default_rng(0)
        x = random.uniform(0, 255, (rows, size, size, 3)).astype(keras.config.floatx())
        return cls(x, random.integers(0, CLASSES, rows), without_dropout)


def run(
    make: Callable[..., keras.Model],
    data: Data,
    train: Callable[[keras.Model], float],
    strategy: tf_gpipe.GPipeStrategy | None = None,
) -> Run:
    """Makes a model and trains it for one step on the whole data by `train`, which returns the loss."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make(weights=None, input_shape=data.x.shape[1:], classes=CLASSES)
        model.compile(keras.optimizers.SGD(RATE), "sparse_categorical_crossentropy")
    layers = model._flatten_layers()
    by_micro_batch = False
    for layer in layers:
        by_micro_batch |= isinstance(layer, keras.layers.BatchNormalization | keras.layers.Dropout)
        if data.without_dropout and isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    averages = [v for v in model.weights if v.name in ("moving_mean", "moving_variance")]
    others = [v for v in model.weights if not any(v is other for other in averages)]
    before = [[v.numpy() for v in variables] for variables in (others, averages)]
    loss = train(model)
    after = [[v.numpy() for v in variables] for variables in (others, averages)]
    steps = [largest_difference(*pair) for pair in zip(before, after, strict=True)]
    changed = [not np.array_equal(a, b) for v, a, b in zip(others, before[0], after[0], strict=True) if v.trainable]
    initial = 0
    for array in before[0]:
        initial = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"", initial)
    facts = {
        "parameters": model.count_params(),
        "by_micro_batch": by_micro_batch,
        **(where(model, strategy) if strategy is not None else {}),
    }
    del model, layers, layer, others, averages, before
    gc.collect()
    return Run(*after, initial, loss, *steps, f"{sum(changed)} of {len(changed)}", facts)


def by_fit(data: Data) -> Callable[[keras.Model], float]:
    """Trains by Keras's own `fit`."""

    def train(model: keras.Model) -> float:
        return model.fit(data.x, data.y, batch_size=len(data.x), shuffle=False, verbose=0).history["loss"][0]

    return train


def by_micro_batches(data: Data, count: int) -> Callable[[keras.Model], float]:
    """Trains by a loop of plain Keras over micro-batches: one update by the sum of their gradients.

    Batch norm normalises each micro-batch by itself. Its moving averages move once, by the statistics of all of them,
    which a momentum of 0 shows.
    """

    def train(model: keras.Model) -> float:
        norms = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
        momenta = [layer.momentum for layer in norms]
        before = [(layer.moving_mean.numpy(), layer.moving_variance.numpy()) for layer in norms]
        for layer in norms:
            layer.momentum = 0.0

        @tf.function
        def gradients(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
            with tf.GradientTape() as tape:
                share = tf.cast(len(x) / len(data.x), model.compute_dtype)
                loss = model.compute_loss(x, y, model(x, training=True)) * share
            return loss, tape.gradient(loss, model.trainable_variables)

        loss, total, seen = 0.0, None, []
        for x, y in zip(np.array_split(data.x, count), np.array_split(data.y, count), strict=True):
            part, made = gradients(tf.constant(x), tf.constant(y))
            loss += float(part)
            total = made if total is None else [a + b for a, b in zip(total, made, strict=True)]
            seen.append((len(x) / len(data.x), [(v.moving_mean.numpy(), v.moving_variance.numpy()) for v in norms]))
        model.optimizer.apply_gradients(zip(total, model.trainable_variables, strict=True))
        for i, layer in enumerate(norms):
            mean = sum(share * of[i][0].astype("float64") for share, of in seen)
            variance = sum(share * (of[i][1] + (of[i][0].astype("float64") - mean) ** 2) for share, of in seen)
            kept = momenta[i]
            layer.moving_mean.assign(before[i][0] * kept + mean * (1 - kept))
            layer.moving_variance.assign(before[i][1] * kept + variance * (1 - kept))
        return loss

    return train


def where(model: keras.Model, strategy: tf_gpipe.GPipeStrategy) -> dict[str, int]:
    """How many devices hold a stage's operations and all of its variables, and how many operations there are."""
    if not model._gpipe_pipelines:
        raise SystemExit(f"{model.name} did not run in the pipeline")
    stages = strategy.plan(model).stages
    devices = set()
    for stage in stages:
        own = tf.DeviceSpec.from_string(stage.device).device_index
        found = {tf.DeviceSpec.from_string(v.value.device).device_index for v in stage.variables}
        if stage.operations and found <= {own}:
            devices.add(own)
    return {"devices": len(devices), "operations": sum(len(stage.operations) for stage in stages)}


def largest_difference(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The largest absolute difference between two lists of arrays; 0 where there are none."""
    return max((float(np.max(np.abs(a - b))) for a, b in zip(one, other, strict=True) if a.size), default=0.0)


def differences(one: Run, other: Run) -> list[float]:
    """The largest of any weight, and of any moving average, as shares of the largest steps."""
    return [
        largest_difference(one.weights, other.weights) / one.step if one.step else float("inf"),
        largest_difference(one.averages, other.averages) / (one.averages_step or 1.0),
    ]


def compare(name: str, against: list[str]) -> dict[str, Any]:
    """Runs a model in this process; returns the cells of its row, and what is wrong under `faults`."""
    devices = tf_gpipe.set_logical_cpus(STAGES)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    row: dict[str, Any] = {"model": name}
    faults: list[str] = []
    make = getattr(keras.applications, name)

    def pair(data: Data, plain: Callable[[keras.Model], float], count: int | None, bar: float, keys: list[str]) -> None:
        started = time.process_time()
        one = run(make, data, plain)
        count = count or (1 if one.facts["by_micro_batch"] or name in LARGE else 2)
        four = run(make, data, by_fit(data), tf_gpipe.GPipeStrategy(STAGES, count, devices=devices))
        shares = differences(one, four)
        row.update(zip(keys, [f"{share:.1e}" if share else "0" for share in shares], strict=False))
        if not one.averages:
            row[keys[1]] = "none"
        row[keys[2]] = f"{time.process_time() - started:.0f}"
        row.update(parameters=f"{four.facts['parameters']:,}", moved=four.moved)
        row.update(operations=f"{four.facts['operations']}", devices=f"{four.facts['devices']}")
        if one.initial != four.initial:
            faults.append("initial weights differ")
        if four.facts["devices"] != STAGES:
            faults.append(f"{four.facts['devices']} devices used")
        if not max(shares) <= bar:
            faults.append(f"{keys[0]}: weights differ by {shares[0]:.1e}, averages by {shares[1]:.1e}")
        if not abs(one.loss - four.loss) <= bar * abs(one.loss):
            faults.append(f"{keys[0]}: losses {one.loss} and {four.loss}")

    columns = list(COLUMNS)
    if "micro" in against:
        data = Data.of(4, max(64, SMALLEST.get(name, 0)), without_dropout=True)
        pair(data, by_micro_batches(data, 2), 2, BAR, columns[5:8])
    if "fit" in against:
        keras.config.set_floatx("float32" if name in LARGE else "float64")
        data = Data.of(7, SMALLEST.get(name, 32), without_dropout=False)
        pair(data, by_fit(data), None, TOLERANCE[keras.config.floatx()], columns[8:11])
    return row | {"faults": faults}


def in_a_process(name: str, against: list[str], limit: float) -> dict[str, Any]:
    """`compare` in a process of its own."""
    command = [sys.executable, __file__, name, "--here", "--against", *against]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"model": name, "faults": [f"not done after {limit:.0f} s"]}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        last = " / ".join(done.stderr.splitlines()[-3:])
        return {"model": name, "faults": [f"exit status {done.returncode}: {last}"]}
    return json.loads(lines[-1])


def written_rows() -> dict[str, dict[str, str]]:
    """The rows of the table as it is."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in cells[1:]}


def write(rows: list[dict[str, Any]]) -> None:
    """Puts rows into the table."""
    table = written_rows()
    for row in rows:
        if not row["faults"]:
            table.setdefault(row["model"], {}).update({key: row[key] for key in COLUMNS if key in row})
    text = HEAD.format(keras=keras.__version__, tensorflow=tf.__version__)
    text += "\n".join(f"- **{key.strip()}**: {meaning}" for key, meaning in COLUMNS.items() if key.strip() == key)
    text += "\n\n| " + " | ".join(key.strip() for key in COLUMNS) + " |\n|---|" + "---:|" * (len(COLUMNS) - 1) + "\n"
    for name in sorted(table, key=list(vars(keras.applications)).index):
        text += "| " + " | ".join(table[name].get(key) or "–" for key in COLUMNS) + " |\n"
    TABLE.write_text(text)


def main() -> int:
    """Compares the models named and prints a line for each."""
    parser = argparse.ArgumentParser(formatter_class=argparse.RawDescriptionHelpFormatter, description=__doc__)
    parser.add_argument("names", nargs="*", help="models of keras.applications; default: all")
    parser.add_argument("--against", nargs="+", default=["micro", "fit"], choices=["micro", "fit"])
    parser.add_argument("--limit", type=float, default=1200, help="seconds for each model")
    parser.add_argument("--write", action="store_true", help=f"put the rows into {TABLE.name}")
    parser.add_argument("--here", action="store_true", help="one model, in this process; prints JSON")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(compare(arguments.names[0], arguments.against)))  # noqa: T201
        return 0
    rows = []
    for name in arguments.names or names():
        rows.append(in_a_process(name, arguments.against, arguments.limit))
        print(", ".join(f"{key.strip()}: {value}" for key, value in rows[-1].items()), flush=True)  # noqa: T201
        if arguments.write:
            write(rows[-1:])
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
