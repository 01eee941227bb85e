r"""AmoebaNet on ImageNet, or on images of your own: input pipeline, training recipe, checkpoints, transfer, memory.

The network and recipe are those of the GPipe paper (arXiv:1811.06965) and of the public TPU code that it grew from: the
defaults are that code's. Images come from any data set of TensorFlow Datasets with a class for each image, or from a
folder. TensorFlow Datasets' page on imagenet2012 says how to fetch ImageNet.

    python examples/imagenet_amoebanet.py --stages 4 --output run             # ImageNet on 4 GPUs, if there are 4
    python examples/imagenet_amoebanet.py --stages 4 --output run --evaluate  # the same arguments, to evaluate
    python examples/imagenet_amoebanet.py --stages 4 --data folder:photos     # photos/train/cat/1.jpg, photos/test/...

It prints how the network is cut, Keras's line for each epoch, and at last the accuracy by the moving averages of the
weights. After each epoch there is a checkpoint: the same command, run again, goes on from the newest one, and comes to
the weights that it would have come to without a break. At the end the averages are in `final.weights.h5` of the output.
Arguments of the model are in its `model.json`, and a command with others is refused.

Short runs look bad: evaluation uses averages over past steps, batch norm's of some tens of steps and, by default, those
of weights of ten thousand. A large `val_loss` beside a loss that falls tells only that they are behind. A run too short
for its averages says so when it begins, and when it ends.

Fine-tuning as in the paper, with a new classifier:

    python examples/imagenet_amoebanet.py --stages 4 --data cars196 --init-from run/final.weights.h5 --output cars \
        --crop full --evaluation-crop 1 --no-colour --cutout 60 --epochs 20 --learning-rate 0.02 --average 0.99

What fits where: the paper's network for ImageNet, AmoebaNet-B(18, 512) at 480x480, on four devices of 16 GiB:

    python examples/imagenet_amoebanet.py --plan --stages 4 --micro-batches 32 --genotype B --cells 18 --filters 512 \
        --image-size 480 --batch-size 128 --device-memory 16

    559,063,693 parameters
    ...
    stage  weights, GiB  stage inputs  activations   total
        0          0.35          0.33         4.14    4.82
        1          1.10          7.03         1.97   10.10
        2          2.70          3.52         1.29    7.51
        3          6.26          1.32         0.76    8.33
    It fits: stage 1 needs most, 10.10 of 16 GiB.

A small network learns scikit-learn's digits in about two minutes, in two stages on logical CPU devices:

    python examples/amoebanet/sklearn_digits.py data
    python examples/imagenet_amoebanet.py --data sklearn_digits --data-dir data --stages 2 --micro-batches 2 \
        --remat always --cells 3 --filters 48 --image-size 40 --no-auxiliary-head --crop full --evaluation-crop 1 \
        --no-flip --no-colour --weight-decay 0.001 --batch-size 96 --epochs 20 --learning-rate 0.05 --decay 0.85 \
        --warm-up-epochs 1 --average 0 --output digits

    top-1 97.5 %, top-5 100.0 %

With `--epochs 2` it comes to 10.1 %; of 20 epochs the fifth is at 93.0 %.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import keras
import tensorflow as tf
import tensorflow_datasets as tfds
from amoebanet import images, memory, model_arguments, training
from amoebanet.model import amoebanet, most_stages
from flags import USAGE, check_stages, errors_of_arguments, number, whole
from shapes import count_parameters, shapes_only

import tf_gpipe

VALUES_PER_WEIGHT = 4  # the weight, its gradient, and RMSProp's two slots; averages are a fifth
# In a smaller one the last reduction has a single pixel to halve: there is nothing to learn, and the gradients that
# TensorFlow 2.21 takes with oneDNN in bfloat16 hold values of uninitialised memory.
SMALLEST_IMAGE = 19
SMALLEST_IMAGE_OF_HEAD = 67  # of which the auxiliary head sees 5x5 features

COUNT = whole(at_least=1)
POSITIVE = number(above=0, below=math.inf)
NOT_NEGATIVE = number(at_least=0, below=math.inf)
PART = number(above=0, at_most=1)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage=USAGE,
        description="Trains an AmoebaNet in a pipeline.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    do = parser.add_argument_group("what to do; without any of these: train, or go on with the training in --output")
    do.add_argument("--plan", action="store_true", help="print stages and their memory, and end")
    do.add_argument("--evaluate", action="store_true", help="evaluate the newest checkpoint in --output, and end")
    do.add_argument("--init-from", type=file, metavar="FILE.weights.h5", help="begin with these, but a new classifier")
    do.add_argument("--output", type=folder, default=Path("amoebanet_run"), help="folder of checkpoints and weights")
    do.add_argument("--logs", type=folder, help="folder of TensorBoard logs")
    add_data_flags(parser)
    add_model_flags(parser)
    add_recipe_flags(parser)
    add_pipeline_flags(parser)
    return parser


def add_data_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    choice, strength = argparse.BooleanOptionalAction, number(at_least=0, at_most=1)
    group.add_argument("--data", default="imagenet2012", help="a data set of TFDS, or folder:PATH")
    group.add_argument("--data-dir", help="where TFDS keeps its data")
    group.add_argument("--image-size", type=whole(at_least=SMALLEST_IMAGE), default=299, help="height and width")
    group.add_argument("--crop", choices=["inception", "full"], default="inception", help="of training images")
    group.add_argument("--evaluation-crop", type=PART, default=0.875, help="of height and width, the middle part")
    group.add_argument("--flip", action=choice, default=True, help="mirror half of the training images")
    group.add_argument("--colour", action=choice, default=True, help="change their brightness and colours")
    group.add_argument("--rand-augment", type=strength, default=0.0, help="strength of RandAugment, 0 to 1")
    group.add_argument("--cutout", type=whole(at_least=0), default=0, help="side in pixels of a square made grey")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    cells, filters = whole(at_least=3, a_multiple_of=3), whole(at_least=4, a_multiple_of=4)
    head = {"action": argparse.BooleanOptionalAction, "default": True}
    group.add_argument("--genotype", choices=["A", "B", "D"], default="D", help="what is inside the cells")
    group.add_argument("--layout", choices=["tf", "torch"], default="tf", help="whose: the TPU code's or torchgpipe's")
    group.add_argument("--cells", type=cells, default=12, help="L: normal cells")
    group.add_argument("--filters", type=filters, default=256, help="D: filters of the first third of them")
    group.add_argument("--auxiliary-head", **head, help="a second classifier, for training")
    group.add_argument("--dropout-keep", type=PART, default=0.5, help="what dropout keeps before the classifier")
    group.add_argument("--drop-path-keep", type=PART, default=1.0, help="at the last step; 1 drops no paths")


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("recipe")
    average = number(at_least=0, below=1)
    group.add_argument("--epochs", type=whole(at_least=0), default=48, help="passes over the training images")
    group.add_argument("--batch-size", type=COUNT, default=256, help="images in a mini-batch")
    group.add_argument("--learning-rate", type=POSITIVE, default=0.64, help="the highest")
    group.add_argument("--decay", type=PART, default=0.9, help="of the learning rate after each epoch")
    group.add_argument("--warm-up-epochs", type=NOT_NEGATIVE, default=3.0, help="in which the learning rate rises")
    group.add_argument("--epsilon", type=POSITIVE, default=1.0, help="of RMSProp")
    group.add_argument("--weight-decay", type=NOT_NEGATIVE, default=4e-5, help="of kernels, in the loss")
    smoothing = number(at_least=0, at_most=1)
    group.add_argument("--label-smoothing", type=smoothing, default=0.1, help="the part spread over all classes")
    group.add_argument("--average", type=average, default=0.9999, help="decay of the averages of weights; 0 for none")
    group.add_argument("--seed", type=whole(at_least=0, below=2**32), default=0, help="of weights and images")


def add_pipeline_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pipeline")
    kinds = {"choices": ["cpu", "gpu", "tpu"], "help": "without it GPUs if there are so many, else logical CPUs"}
    group.add_argument("--stages", type=COUNT, default=4, help="K, each on a device")
    group.add_argument("--devices", **kinds)
    group.add_argument("--micro-batches", type=COUNT, default=16, help="M, into which a mini-batch is split")
    modes = ["always", "except_last", "never"]
    group.add_argument("--remat", choices=modes, default="except_last", help="what recomputes its activations")
    group.add_argument("--jit-compile", action="store_true", help="compile each stage with XLA")
    group.add_argument("--mixed-precision", action="store_true", help="bfloat16 activations, float32 weights")
    group.add_argument("--device-memory", type=POSITIVE, default=16.0, help="GiB of a device, for --plan")


def file(text: str) -> Path:
    """The type of a flag that names a file to read."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"Expected a file. Received: {text!r}, where there is none.")
    return Path(text)


def folder(text: str) -> Path:
    """The type of a flag that names a folder to write to."""
    if Path(text).exists() and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"Expected a folder, which may be a new one. Received: {text!r}, a file.")
    return Path(text)


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    arguments = parser.parse_args(argv)
    if arguments.layout == "torch":
        arguments.auxiliary_head = False
    if arguments.auxiliary_head and arguments.image_size < SMALLEST_IMAGE_OF_HEAD:
        parser.error(
            f"argument --image-size: Expected at least {SMALLEST_IMAGE_OF_HEAD} pixels for the auxiliary head. "
            f"Received: '{arguments.image_size}'. Leave the head out with --no-auxiliary-head."
        )
    check_stages(parser, arguments.stages, most_stages(arguments.cells, arguments.auxiliary_head))
    if arguments.evaluate and not epochs_done(arguments):
        parser.error(f"argument --evaluate: Expected a checkpoint in {arguments.output}. Received: none. Train first.")
    return arguments


def checkpoint_folder(arguments: argparse.Namespace) -> Path:
    return arguments.output / "checkpoints"


def epochs_done(arguments: argparse.Namespace) -> int:
    return training.epochs_done(checkpoint_folder(arguments))


def make_model(arguments: argparse.Namespace, num_classes: int) -> keras.Model:
    return amoebanet(
        arguments.genotype,
        arguments.cells,
        arguments.filters,
        arguments.image_size,
        num_classes,
        layout=arguments.layout,
        auxiliary_head=arguments.auxiliary_head,
        dropout=1 - arguments.dropout_keep,
        drop_path=arguments.drop_path_keep < 1,
        weight_decay=arguments.weight_decay,
    )


def print_plan(arguments: argparse.Namespace, strategy: tf_gpipe.GPipeStrategy, num_classes: int) -> None:
    with shapes_only():
        with strategy.scope():
            model = make_model(arguments, num_classes)
        plan = strategy.plan(model)
        values = VALUES_PER_WEIGHT + (arguments.average > 0)
        rows = arguments.batch_size, arguments.micro_batches
        estimates = memory.estimate(plan, *rows, arguments.remat, values)
        print(f"{count_parameters(model):,} parameters")
    print(plan, memory.report(plan, estimates, arguments.device_memory), sep="\n\n")


def labelled(batches: tf.data.Dataset, model: keras.Model) -> tf.data.Dataset:
    """The same labels for each output of the model."""
    names = list(model.output)
    return batches.map(lambda images, labels: (images, dict.fromkeys(names, labels)))


def train(
    arguments: argparse.Namespace,
    model: keras.Model,
    checkpoints: training.Checkpoints,
    builder: tfds.core.DatasetBuilder,
    first_epoch: int,
) -> None:
    """Trains to the last epoch, and leaves the averages of the weights in the model."""
    names = ("crop", "flip", "colour", "rand_augment", "cutout")
    augmentation = images.Augmentation(**{name: getattr(arguments, name) for name in names})
    size = arguments.image_size, arguments.batch_size
    epochs = range(first_epoch, arguments.epochs)
    batches = images.training_images(builder, *size, epochs=epochs, augmentation=augmentation, seed=arguments.seed)

    callbacks = [*training.averaging_callbacks(model), checkpoints.callback]
    if arguments.drop_path_keep < 1:
        num_steps = arguments.epochs * images.steps_per_epoch(builder, arguments.batch_size)
        callbacks.append(training.ScheduledDropPath(arguments.drop_path_keep, num_steps))
    if arguments.logs:
        callbacks.append(keras.callbacks.TensorBoard(arguments.logs))
    model.fit(
        labelled(batches, model),
        epochs=arguments.epochs,
        initial_epoch=first_epoch,
        steps_per_epoch=images.steps_per_epoch(builder, arguments.batch_size),
        validation_data=labelled(images.evaluation_images(builder, *size, arguments.evaluation_crop), model),
        callbacks=callbacks,
        shuffle=False,
        verbose=2,
    )


def set_up_devices(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Makes logical CPU devices for the stages, where these shall or have to run on them."""
    gpus = len(tf.config.list_physical_devices("GPU"))
    if arguments.devices == "gpu" and gpus < arguments.stages:
        parser.error(
            f"argument --devices: Expected a GPU for each of {arguments.stages} stages. Received: 'gpu', and {gpus} of "
            f"them here. Take --devices cpu{', or fewer --stages' if gpus else ''}."
        )
    if arguments.devices == "cpu" or (arguments.devices is None and gpus < arguments.stages):
        tf_gpipe.set_logical_cpus(arguments.stages)  # before TensorFlow starts


def compile_model(arguments: argparse.Namespace, model: keras.Model, steps_per_epoch: int) -> None:
    rate = training.WarmUpAndDecay(arguments.learning_rate, steps_per_epoch, arguments.warm_up_epochs, arguments.decay)
    recipe = {"label_smoothing": arguments.label_smoothing, "average": arguments.average}
    training.compile_model(model, rate, epsilon=arguments.epsilon, **recipe)


def print_accuracy(arguments: argparse.Namespace, model: keras.Model, builder: tfds.core.DatasetBuilder) -> None:
    size = arguments.image_size, arguments.batch_size
    tests = images.evaluation_images(builder, *size, arguments.evaluation_crop)
    results = model.evaluate(labelled(tests, model), return_dict=True, verbose=0)
    top_1, top_5 = (100 * results[name] for name in training.metric_names(model))
    print(f"top-1 {top_1:.1f} %, top-5 {top_5:.1f} %")


def keep_model_arguments(arguments: argparse.Namespace, num_classes: int) -> None:
    """Keeps them for a new training; raises a ValueError if those of the training in --output differ."""
    made = model_arguments.of(arguments, num_classes)
    if epochs_done(arguments):
        model_arguments.check(made, arguments.output)
    else:
        model_arguments.save(made, arguments.output)


def print_progress(arguments: argparse.Namespace, done: int) -> None:
    """Says what becomes of a training that there is."""
    if arguments.evaluate:
        print(f"Evaluating the checkpoint of epoch {done} in {arguments.output}")
    elif done >= arguments.epochs:
        of_more = f" ({done} in {arguments.output})" if done > arguments.epochs else ""
        print(f"All {arguments.epochs} epochs are done{of_more}: evaluating")
    else:
        print(f"Going on from the checkpoint of epoch {done} of {arguments.epochs} in {arguments.output}")


def remark_on_length(arguments: argparse.Namespace, steps_per_epoch: int) -> str:
    """Says that a training is too short for its averages of weights: too much of the first ones would be in them."""
    steps = arguments.epochs * steps_per_epoch
    needed = round(3 / (1 - arguments.average)) if arguments.average else 0  # of what they began with 5 % are left
    if not arguments.epochs or steps >= needed:
        return ""
    return (
        f"Too short to learn: {steps:,} steps, where --average {arguments.average} needs {needed:,}. "
        "Take a smaller --average, 0 for none, or more --epochs."
    )


def train_and_evaluate(
    arguments: argparse.Namespace,
    model: keras.Model,
    checkpoints: training.Checkpoints,
    builder: tfds.core.DatasetBuilder,
) -> None:
    """Trains from the newest checkpoint on, if there is one and unless --evaluate is given; prints the accuracy."""
    done = epochs_done(arguments)
    remark = remark_on_length(arguments, images.steps_per_epoch(builder, arguments.batch_size))
    if done:
        checkpoints.restore()
        print_progress(arguments, done)
    if done < arguments.epochs and not arguments.evaluate:
        if remark:
            print(remark, flush=True)
        train(arguments, model, checkpoints, builder, done)
    elif done:
        model.optimizer.finalize_variable_values(model.trainable_weights)  # the averages
    if not arguments.evaluate:
        model.save_weights(arguments.output / "final.weights.h5")
    if remark:
        print(remark)
    print_accuracy(arguments, model, builder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments = parse_arguments(parser, argv)
    set_up_devices(parser, arguments)
    if arguments.mixed_precision:
        keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.set_random_seed(arguments.seed)
    pipeline = {"devices": arguments.devices, "remat": arguments.remat, "jit_compile": arguments.jit_compile}
    with errors_of_arguments(parser):
        strategy = tf_gpipe.GPipeStrategy(arguments.stages, arguments.micro_batches, **pipeline)
        builder = images.open_data(arguments.data, arguments.data_dir)
        num_classes = images.num_classes(builder)
    if arguments.plan:
        print_plan(arguments, strategy, num_classes)
        return

    with errors_of_arguments(parser):
        images.prepare(builder)
        steps_per_epoch = images.steps_per_epoch(builder, arguments.batch_size)
        images.evaluation_split(builder)
        keep_model_arguments(arguments, num_classes)
    with strategy.scope():
        model = make_model(arguments, num_classes)
        if arguments.init_from:
            with errors_of_arguments(parser):
                training.load_pretrained(model, arguments.init_from)
        compile_model(arguments, model, steps_per_epoch)
        checkpoints = training.Checkpoints(model, checkpoint_folder(arguments))
    print(strategy.plan(model))
    try:
        with images.naming_broken_files(builder):
            train_and_evaluate(arguments, model, checkpoints, builder)
    except images.BrokenFileError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    main()
