"""Where to cut a model: by equal work, by numbers of operations, by names; and what a bad balance costs.

The plan of a model says how much of the work each stage has. A pipeline is as slow as its heaviest stage: where the
stages have unequal shares, the others wait for it, which the timeline of a measured step shows as imbalance. Here the
same eight layers are cut in the middle, by `"flops"` and by the name to cut before, and then badly, by numbers of
operations that leave seven layers of eight to one stage. Where a model is cut makes no difference to its weights.

    python examples/own_partition.py          # half a minute, mostly the start-up of the traced steps
    python examples/own_partition.py --quick  # smaller layers, for the tests

For each partition it prints the plan and the measured step, and at the end what the bad one has cost:

    a step takes 1.5 times as long with [7, 1] as with 'flops'
    three partitions: largest difference of any weight 0.0e+00

On two cores that other programs used too, the balanced step took 163.5 ms, with 2.2 % imbalance, and the other one
250.0 ms, with 25.1 %.
"""

import argparse
import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe

LAYERS = 8


def compiled_model(strategy: tf_gpipe.GPipeStrategy, units: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(units, "tanh", name=f"dense_{i}") for i in range(LAYERS)]
        model = keras.Sequential([keras.Input([units]), *layers], name="chain")
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Cuts a model in three ways and measures a step of each.")
    parser.add_argument("--quick", action="store_true", help="layers of 64 units (default: 512)")
    arguments = parser.parse_args()
    units = 64 if arguments.quick else 512

    tf_gpipe.set_logical_cpus(2)
    tf.config.threading.set_intra_op_parallelism_threads(1)  # one core for each device, as if they were two machines
    numbers = np.random.default_rng(0)
    x, y = (numbers.normal(size=(2048, units)).astype("float32") for _ in range(2))

    warnings.filterwarnings("ignore", category=tf_gpipe.GPipeWarning)  # one partition is uneven on purpose
    weights, durations = [], []
    for partition in ("flops", ["dense_4"], [7, 1]):
        strategy = tf_gpipe.GPipeStrategy(num_stages=2, num_micro_batches=8, partition=partition)
        model = compiled_model(strategy, units)
        timeline = strategy.trace(model, (x, y))
        print(f"partition={partition!r}\n{strategy.plan(model)}\n\n{tf_gpipe.draw(timeline)}\n")
        model.train_on_batch(x, y)
        weights.append(model.get_weights())
        durations.append(timeline.duration)

    if arguments.quick:
        print("--quick: steps too short to be compared, it only shows that all of it runs")
    else:
        print(f"a step takes {durations[-1] / durations[0]:.1f} times as long with [7, 1] as with 'flops'")
    first, *others = weights
    difference = max(np.max(np.abs(a - b)) for other in others for a, b in zip(first, other, strict=True))
    print(f"three partitions: largest difference of any weight {difference:.1e}")


if __name__ == "__main__":
    main()
