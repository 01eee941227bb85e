"""Which events of TensorFlow's profiler name the task that they belong to: for page 0011.

python docs/decisions/measure_profiler_events.py
"""

import collections
import os
import re
import tempfile
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import keras
import numpy as np
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

import tf_gpipe
from tf_gpipe import compat

TASK = re.compile(r"stage_\d+/micro_batch_\d+/(forward|backward)/")
STAGES, MICRO_BATCHES, LAYERS = 2, 4, 4


def events(jit_compile: bool, directory: str) -> collections.Counter:
    """Names of the events of one step, with how often each is there."""
    strategy = tf_gpipe.GPipeStrategy(STAGES, MICRO_BATCHES, jit_compile=jit_compile, remat="always")
    with strategy.scope():
        model = keras.Sequential([keras.Input([64]), *(keras.layers.Dense(64) for _ in range(LAYERS))])
        model.compile("sgd", "mse", jit_compile=False)
    x = np.ones([64, 64], "float32")
    model.train_on_batch(x, x)
    with tf.profiler.experimental.Profile(directory):
        model.train_on_batch(x, x)
    (file,) = Path(directory).rglob("*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(file.read_bytes())
    return collections.Counter(
        plane.event_metadata[event.metadata_id].name
        for plane in space.planes
        for line in plane.lines
        for event in line.events
    )


def main() -> None:
    """Prints the figures."""
    tf_gpipe.set_logical_cpus(STAGES)
    compat.is_cpu = lambda device: False  # stages are called as on accelerators
    for jit_compile in (False, True):
        with tempfile.TemporaryDirectory() as directory:
            found = events(jit_compile, directory)
        products = {name: count for name, count in found.items() if "MatMul" in name}
        named = {name for name in found if TASK.search(name)}
        kinds = collections.Counter(name.rsplit(":", 1)[-1] for name in named)
        of_tasks = sum(count for name, count in products.items() if TASK.search(name))
        print(f"jit_compile={jit_compile}: {sum(products.values())} events of products, {of_tasks} of them name a task")
        print(f"  such as {min(products)}; types of events that name a task: {dict(kinds)}")


if __name__ == "__main__":
    main()
