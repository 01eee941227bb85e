"""Does the pipeline do what plain Keras does, on the devices of this machine, and how fast?

    python examples/self_check.py > report.md  # all GPUs, or four logical CPU devices where there are none
    python examples/self_check.py --stages 2   # on no more than two
    python examples/self_check.py --quick      # tiny models in two stages, for the tests

A single GPU is divided into two logical ones of 2 GB. A dense, a convolutional and a Transformer model are trained by
SGD in plain Keras on one device and in pipelines of 1, 2, ... stages; the longest of them also with XLA and in mixed
precision. Each pipeline has to come to the weights of its reference, and each weight and its momentum have to stand on
the device of a stage that uses the weight. The reference is plain Keras. Batch norm normalises micro-batches, so that
with several of them the reference of the convolutional model is the pipeline of one stage, and with one micro-batch,
plain Keras.

It prints a report in Markdown, to paste into an issue: the load of the machine, which makes steps slower; what the
columns mean; a table; the error of each case that failed with one; and the lines of `python -m tf_gpipe doctor`.

The exit code is 1 if a check fails. On four logical CPU devices of two busy cores it took five minutes, and ended with

    27 cases, 0 failed; largest difference of any weight 4.1e-06 in float32, 3.8e-03 in mixed_float16
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keeps TensorFlow's log out of the table

import keras
import numpy as np
import tensorflow as tf

import tf_gpipe
from tf_gpipe import doctor_checks, doctor_facts

CHECKED_STEPS = 4
NUM_CLASSES = 10
NUM_MICRO_BATCHES = 8
MOST_STAGES = 9  # operations of the dense model
TOLERANCE = {"float32": 1e-3, "mixed_float16": 0.1}  # of what training changed
SPLIT_GPU_MB = 2048
COLUMNS = """\
"differ by": the largest difference of any weight, as a share of the longest way that one of the reference went.
"x plain": step time as a multiple of plain Keras's, which has all CPUs; "reference": plain Keras; "peak": each GPU's.
"""


class Size(NamedTuple):
    """How large the models are, and how many steps are timed."""

    rows: int
    width: int
    blocks: int
    timed_steps: int


FULL = Size(rows=128, width=256, blocks=8, timed_steps=5)
QUICK = Size(rows=16, width=16, blocks=2, timed_steps=1)


@dataclasses.dataclass(frozen=True)
class Case:
    """How a model is trained; with `num_stages=0` in plain Keras."""

    model: str
    num_stages: int = 0
    num_micro_batches: int = 0
    xla: bool = False
    precision: str = "float32"

    @property
    def cells(self) -> list[str]:
        """What the table calls it."""
        name = f"K = {self.num_stages}, M = {self.num_micro_batches}" if self.num_stages else "plain Keras"
        return [self.model, name, "yes" if self.xla else "no", self.precision]

    @property
    def plain(self) -> "Case":
        """The same in plain Keras."""
        return dataclasses.replace(self, num_stages=0, num_micro_batches=0)

    @property
    def reference(self) -> "Case":
        """What comes to the same weights."""
        if self.model == "convolutional" and self.num_micro_batches > 1:
            return dataclasses.replace(self, num_stages=1)
        return self.plain


class Result(NamedTuple):
    """The weights after `CHECKED_STEPS`; names of weights on a wrong device; step time; bytes on each GPU."""

    weights: list[np.ndarray]
    misplaced: list[str]
    step_seconds: float
    peak_bytes: list[int]


def make_model(name: str, size: Size) -> keras.Model:
    if name == "dense":
        inputs = x = keras.Input([size.width])
        for _ in range(size.blocks):
            x = keras.layers.Dense(size.width, "gelu")(x)
    elif name == "convolutional":
        filters = size.width // 16
        inputs = x = keras.Input([16, 16, filters])
        for _ in range(size.blocks):
            x = keras.layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = keras.layers.Activation("gelu")(keras.layers.BatchNormalization()(x))
        x = keras.layers.GlobalAveragePooling2D()(x)
    else:
        width = size.width // 4
        inputs = x = keras.Input([32, width])
        for _ in range(size.blocks // 2):
            normed = keras.layers.LayerNormalization()(x)
            x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(4, width // 4)(normed, normed)])
            hidden = keras.layers.Dense(4 * width, "gelu")(keras.layers.LayerNormalization()(x))
            x = keras.layers.Add()([x, keras.layers.Dense(width)(hidden)])
        x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES, dtype="float32")(x), name=name)


@functools.cache
def initial_weights(name: str, size: Size) -> list[np.ndarray]:
    keras.utils.set_random_seed(0)
    return make_model(name, size).get_weights()


def compiled_model(case: Case, size: Size, devices: Sequence[str]) -> tuple[keras.Model, tf_gpipe.GPipeStrategy | None]:
    strategy = None
    if case.num_stages:
        options = {"devices": devices[: case.num_stages], "jit_compile": case.xla}
        strategy = tf_gpipe.GPipeStrategy(case.num_stages, case.num_micro_batches, **options)
    keras.config.set_dtype_policy(case.precision)
    try:
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = make_model(case.model, size)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss, jit_compile=case.xla and strategy is None)
    finally:
        keras.config.set_dtype_policy("float32")
    return model, strategy


@functools.cache
def train(case: Case, size: Size, devices: tuple[str, ...]) -> Result:
    initial = initial_weights(case.model, size)
    gc.collect()  # of the models before, so that the peak is this one's
    gpus = [device for device in devices if device.startswith("GPU")]
    for gpu in gpus:
        tf.config.experimental.reset_memory_stats(gpu)
    model, strategy = compiled_model(case, size, devices)
    model.set_weights(initial)
    random = np.random.default_rng(0)
    x = random.normal(size=(size.rows, *model.input_shape[1:])).astype("float32")
    y = random.integers(NUM_CLASSES, size=size.rows)

    for _ in range(CHECKED_STEPS):
        model.train_on_batch(x, y)
    weights = model.get_weights()
    seconds = []
    for _ in range(size.timed_steps):
        start = time.perf_counter()
        model.train_on_batch(x, y)
        seconds.append(time.perf_counter() - start)

    misplaced = find_misplaced(model, strategy.plan(model)) if strategy else []
    peaks = [tf.config.experimental.get_memory_info(gpu)["peak"] for gpu in gpus]
    return Result(weights, misplaced, float(np.median(seconds)), peaks)


def find_misplaced(model: keras.Model, plan: tf_gpipe.Plan) -> list[str]:
    """Paths of weights that are on no device of a stage that uses them, and of momenta that should be beside them."""
    homes: dict[int, set[str]] = {}
    for stage in plan.stages:
        for variable in stage.variables:
            homes.setdefault(id(variable), set()).add(stage.device)
    momentums = getattr(model.optimizer, "inner_optimizer", model.optimizer).momentums
    pairs = [*zip(model.weights, model.weights, strict=True), *zip(model.trainable_variables, momentums, strict=True)]
    return [variable.path for weight, variable in pairs if variable.value.device not in homes[id(weight)]]


def find_difference(weights: list[np.ndarray], reference: list[np.ndarray], initial: list[np.ndarray]) -> float:
    def largest(left: list[np.ndarray], right: list[np.ndarray]) -> float:
        return float(np.max([np.max(np.abs(a - b)) for a, b in zip(left, right, strict=True)]))

    return largest(weights, reference) / largest(reference, initial)


def make_cases(stage_counts: Sequence[int], quick: bool) -> list[Case]:
    """Each pipeline after the plain Keras that it is compared with."""
    cases = []
    for model in ("dense", "convolutional", "transformer"):
        modes: list[dict] = [{}, {"xla": True}, {"precision": "mixed_float16"}]
        for mode in modes[:1] if quick and model != "dense" else modes:
            cases.append(Case(model, **mode))
            for num_stages in stage_counts[-1:] if mode else stage_counts:
                as_plain = model == "convolutional" and num_stages == 1
                cases.append(Case(model, num_stages, 1 if as_plain else NUM_MICRO_BATCHES, **mode))
    return cases


class Outcome(NamedTuple):
    """What is known of a case: its cells of the table, by how much its weights differ, and what is wrong."""

    cells: list[str]
    differ: float = 0.0
    wrong: str = ""
    traceback: str = ""


def check(case: Case, size: Size, devices: tuple[str, ...]) -> Outcome:
    """Trains a case and what it is compared with."""
    try:
        result, reference, plain = (train(c, size, devices) for c in (case, case.reference, case.plain))
    except Exception as error:  # the other cases still tell something
        wrong = type(error).__name__
        return Outcome([*case.cells, "", "", "", "", f"FAILED: {wrong}"], wrong=wrong, traceback=traceback.format_exc())
    differ = find_difference(result.weights, reference.weights, initial_weights(case.model, size))
    found = [] if differ <= TOLERANCE[case.precision] else ["weights differ"]
    found += ["misplaced: " + " ".join(result.misplaced)] if result.misplaced else []
    wrong = ", ".join(found)
    step, peaks = result.step_seconds, " / ".join(f"{peak / 1e6:.0f}" for peak in result.peak_bytes)
    cells = [f"{differ:.1e}" if case.num_stages else "", f"{1e3 * step:.1f}", f"{step / plain.step_seconds:.2f}", peaks]
    verdict = f"FAILED: {wrong}" if wrong else "ok" if case.num_stages else "reference"
    return Outcome([*case.cells, *cells, verdict], differ, wrong)


def make_devices(num_devices: int | None) -> tuple[str, ...]:
    """Names of the devices, as many as asked for, once TensorFlow has been set up for them."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return tuple(name.strip("/") for name in tf_gpipe.set_logical_cpus(num_devices or 4))
    # Ampere and later would round the factors of float32 products to 10 bits.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if len(gpus) == 1:
        halves = [tf.config.LogicalDeviceConfiguration(memory_limit=SPLIT_GPU_MB)] * 2
        tf.config.set_logical_device_configuration(gpus[0], halves)
    else:
        for gpu in gpus:
            tf.config.experimental.set_memory_growth(gpu, True)
    there = len(tf.config.list_logical_devices("GPU"))
    return tuple(f"GPU:{i}" for i in range(min(there, num_devices or MOST_STAGES)))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        description="Checks pipelines against plain Keras on the devices of this machine, in some minutes. Prints a "
        "report in Markdown, to paste into an issue. Exit code 1 if a check fails."
    )
    which = parser.add_mutually_exclusive_group()
    limits = f"the most stages, 1 to {MOST_STAGES} (default: the number of GPUs, 2 on a single one, 4 without any)"
    which.add_argument("--stages", type=int, choices=range(1, MOST_STAGES + 1), metavar="K", help=limits)
    which.add_argument("--quick", action="store_true", help="tiny models in two stages (default: full size)")
    return parser, parser.parse_args(arguments)


def print_table(cases: Sequence[Case], size: Size, devices: tuple[str, ...]) -> list[Outcome]:
    """Checks the cases, each a row of the table as soon as it is done."""
    head = ["model", "trained in", "XLA", "precision", "differ by", "step, ms", "x plain", "peak, MB", "result"]
    print("|", " | ".join(head), "|")
    print("|", " | ".join(["---"] * len(head)), "|", flush=True)
    outcomes = []
    for number, case in enumerate(cases, 1):
        if not sys.stdout.isatty():  # where the rows are not seen to come
            what = [*case.cells[:2], *(["XLA"] if case.xla else []), case.precision]
            print(f"{number} of {len(cases)}: {', '.join(what)}", file=sys.stderr, flush=True)
        outcomes.append(check(case, size, devices))
        print("|", " | ".join(outcomes[-1].cells), "|", flush=True)
    return outcomes


def load_of_machine() -> str:
    """How many processes run or wait to, on average; other work than this makes steps slower."""
    try:
        averages = os.getloadavg()
    except (AttributeError, OSError):
        return "Load of the machine at the start: unknown here"
    listed = ", ".join(f"{average:.1f}" for average in averages)
    return f"Load of the machine at the start, over 1, 5 and 15 minutes: {listed}, on {os.cpu_count()} cores"


def print_block(text: str) -> None:
    """Lines that Markdown shows as they are."""
    print(f"\n```\n{text.rstrip()}\n```")


def main(arguments: Sequence[str] | None = None) -> int:
    parser, options = parse(arguments)
    load = load_of_machine()
    facts = doctor_facts.gather()  # before TensorFlow takes the GPUs' memory in this process
    findings = doctor_checks.diagnose(facts)
    for finding in findings:
        if finding.is_fault:  # which may be why no GPU is used
            print(f"FAULT: {finding.message}\n    {finding.remedy}", file=sys.stderr, flush=True)
    devices = make_devices(2 if options.quick else options.stages)
    if options.stages and options.stages > len(devices):
        parser.error(
            f"argument --stages: Expected at most {len(devices)}, for {' and '.join(devices)}. "
            f"Received: '{options.stages}'."
        )
    size, counts = (QUICK, [len(devices)]) if options.quick else (FULL, range(1, len(devices) + 1))

    print(f"Self-check of tf_gpipe {tf_gpipe.__version__} on {', '.join(devices)}\n")
    print(load, COLUMNS, sep="\n\n", flush=True)
    outcomes = print_table(make_cases(counts, options.quick), size, devices)
    largest = dict.fromkeys(TOLERANCE, 0.0)
    for outcome in outcomes:
        precision = outcome.cells[3]
        largest[precision] = max(largest[precision], outcome.differ)
    num_failed = sum(bool(outcome.wrong) for outcome in outcomes)
    listed = ", ".join(f"{value:.1e} in {precision}" for precision, value in largest.items())
    print(f"\n{len(outcomes)} cases, {num_failed} failed; largest difference of any weight {listed}")
    for trace in dict.fromkeys(outcome.traceback for outcome in outcomes if outcome.traceback):
        print_block(trace)
    print_block(doctor_checks.report(facts, findings))
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
