"""Trains every model of `keras.applications` for one step in four stages, and compares it with one device.

    python tests/compare_applications.py                          all models, one line each
    python tests/compare_applications.py VGG16 DenseNet121        these models
    python tests/compare_applications.py --write                  puts the rows into docs/keras_applications.md too

Each model runs in a process of its own, which is ended after `--limit` seconds, so that memory is given back.
`--against` chooses one of the two comparisons. With `--write`, what is not measured stays in the table as it was. The
exit status is 1 if a model differs or fails.
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
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe

TABLE = Path(__file__).parents[1] / "docs" / "keras_applications.md"
STAGES, ROWS, CLASSES, RATE = 4, 7, 10, 0.1
SMALLEST = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}
"""Height and width below which Keras refuses to make a model; 32 for all others."""
LARGE = ("ConvNeXtXLarge",)
"""Compared with plain Keras in float32, which halves the memory, and so with one micro-batch: with two, sums are taken
in another order, whose rounding in float32 is near the tolerance."""
TOLERANCE = {"float32": 1e-6, "float64": 1e-10}
COLUMNS = {
    "model": "the function of `keras.applications`, called with `weights=None` and 10 classes",
    "input": "height and width of the images, the smallest that Keras allows; 7 rows, so that two micro-batches differ",
    "operations": "steps of the chain that is cut into four stages",
    "parameters": "numbers in the model's weights",
    "devices": "how many devices hold a stage's operations and all of its variables",
    "moved": "how many of the trainable weights one step of SGD(0.1) changed (ConvNeXt scales branches by "
    "1e-6, so that float32 rounds the steps of some biases to nothing)",
    "K=4 and K=1": "largest difference of any weight after the step between four stages and one, both with two "
    "micro-batches, float32, as a share of the largest step of any weight",
    "averages": "the same for the moving averages of batch normalisation, as a share of their largest step",
    "s": "seconds of processor time that the comparison took, with the making of both models and their tracing",
    "K=4 and plain": "as `K=4 and K=1`, between four stages and plain Keras, in float64: with one micro-batch where "
    "the model has batch normalisation or dropout, else with two (ConvNeXtXLarge: float32, one, to halve the memory)",
    "averages ": "as above, for this comparison",
    "s ": "as above, for this comparison",
}
HEAD = """# The models of keras.applications

One training step in four stages on four devices, compared with one device. Written by

```bash
python tests/compare_applications.py --write
```

with Keras {keras} and TensorFlow {tensorflow} on logical CPU devices. Both sides run without Grappler: what it fuses
depends on what is in one graph, and through batch normalisation and ReLU a difference in rounding grows until it is
larger than the tolerance. A dash: not measured. `0`: the same numbers, bit for bit.

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


def run(name: str, strategy: tf_gpipe.GPipeStrategy | None) -> Run:
    """Makes a model and trains it for one step on the whole data."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    size = SMALLEST.get(name, 32)
    random = np.random.default_rng(0)
    x = random.uniform(0, 255, (ROWS, size, size, 3)).astype(keras.config.floatx())
    y = random.integers(0, CLASSES, ROWS)
    make = getattr(keras.applications, name)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make(weights=None, input_shape=(size, size, 3), classes=CLASSES)
        model.compile(keras.optimizers.SGD(RATE), "sparse_categorical_crossentropy")
    averages = [v for v in model.weights if v.name in ("moving_mean", "moving_variance")]
    others = [v for v in model.weights if not any(v is other for other in averages)]
    before = [[v.numpy() for v in variables] for variables in (others, averages)]
    loss = model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0).history["loss"][0]
    after = [[v.numpy() for v in variables] for variables in (others, averages)]
    steps = [largest_difference(*pair) for pair in zip(before, after, strict=True)]
    changed = [not np.array_equal(a, b) for v, a, b in zip(others, before[0], after[0], strict=True) if v.trainable]
    initial = 0
    for array in before[0]:
        initial = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"", initial)
    kinds = keras.layers.BatchNormalization | keras.layers.Dropout
    facts = {
        "size": size,
        "parameters": model.count_params(),
        "by_micro_batch": any(isinstance(layer, kinds) for layer in model._flatten_layers()),
        **(where(model, strategy) if strategy is not None else {}),
    }
    del model, others, averages, before
    gc.collect()
    return Run(*after, initial, loss, *steps, f"{sum(changed)} of {len(changed)}", facts)


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


def compare(name: str, against: list[str]) -> dict[str, Any]:
    """Runs a model in this process; returns the cells of its row, and what is wrong under `faults`."""
    devices = tf_gpipe.set_logical_cpus(STAGES)
    tf.config.threading.set_inter_op_parallelism_threads(4)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    row: dict[str, Any] = {"model": name}
    faults: list[str] = []

    def pair(reference: tf_gpipe.GPipeStrategy | None, num_micro_batches: int | None, keys: list[str]) -> None:
        started = time.process_time()
        one = run(name, reference)
        count = num_micro_batches or (1 if one.facts["by_micro_batch"] or name in LARGE else 2)
        four = run(name, tf_gpipe.GPipeStrategy(STAGES, count, devices=devices))
        shares = [
            largest_difference(one.weights, four.weights) / one.step if one.step else float("inf"),
            largest_difference(one.averages, four.averages) / (one.averages_step or 1.0),
        ]
        row.update(zip(keys, [f"{share:.1e}" if share else "0" for share in shares], strict=False))
        if not one.averages:
            row[keys[1]] = "none"
        row[keys[2]] = f"{time.process_time() - started:.0f}"
        row.update(input=f"{four.facts['size']}", parameters=f"{four.facts['parameters']:,}", moved=four.moved)
        row.update(operations=f"{four.facts['operations']}", devices=f"{four.facts['devices']}")
        if one.initial != four.initial:
            faults.append("initial weights differ")
        if four.facts["devices"] != STAGES:
            faults.append(f"{four.facts['devices']} devices used")
        if not max(shares) <= TOLERANCE[keras.config.floatx()]:
            faults.append(f"{keys[0]}: weights differ by {shares[0]:.1e}, averages by {shares[1]:.1e}")
        if not abs(one.loss - four.loss) <= TOLERANCE[keras.config.floatx()] * abs(one.loss):
            faults.append(f"{keys[0]}: losses {one.loss} and {four.loss}")

    columns = list(COLUMNS)
    if "one" in against:
        pair(tf_gpipe.GPipeStrategy(1, 2, devices=devices[:1], remat="never"), 2, columns[6:9])
    if "plain" in against:
        keras.config.set_floatx("float32" if name in LARGE else "float64")
        pair(None, None, columns[9:12])
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
    parser.add_argument("--against", nargs="+", default=["one", "plain"], choices=["one", "plain"])
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
