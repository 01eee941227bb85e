"""A U-Net that removes noise from photographs: skips that pass over several stages.

The way down halves the image at every level, the way up doubles it again, and each level of the way up also takes what
the same level of the way down has made. So the first stage of a pipeline hands a tensor to the last one. It goes there
directly: the stages in between neither receive nor keep it.

The network is that of torchgpipe's benchmarks (arXiv:2004.09910), with B blocks a level and C channels at the first
level. A block is a 3x3 convolution without bias, dropout of whole channels, instance norm, and a leaky ReLU. Here it
has three levels instead of five, B = 1 and C = 16, and learns the noise in 64x64 crops of scikit-learn's photographs.

    python examples/unet.py          # 4 stages, about a minute
    python examples/unet.py --quick  # small crops and few steps, for the tests

It prints the plan, the stages that each skip connects, the largest difference that the number of stages makes to any
weight, and how near to the clean pictures noisy and denoised ones are, in a part of the photographs that was held out:

    skip 0: from stage 0 to stage 3
    4 stages and 1 stage: largest difference of any weight 0.0e+00
    noisy 20.0 dB, denoised 24.4 dB
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # TensorFlow logs errors only; before it is imported

import keras
import numpy as np
import sklearn.datasets

import tf_gpipe

NUM_STAGES = 4
DEPTH = 3
NOISE = 0.1  # standard deviation, for pixels from 0 to 1


def blocks(x: keras.KerasTensor, filters: list[int], name: str) -> keras.KerasTensor:
    """The convolution blocks of one level, one for each number of filters."""
    for i, channels in enumerate(filters):
        x = keras.layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"{name}_{i}_convolution")(x)
        x = keras.layers.SpatialDropout2D(0.1, seed=0, name=f"{name}_{i}_dropout")(x)
        # Each channel is a group (-1), and nothing is learnt: instance norm.
        x = keras.layers.GroupNormalization(-1, epsilon=1e-5, center=False, scale=False, name=f"{name}_{i}_norm")(x)
        x = keras.layers.LeakyReLU(0.01, name=f"{name}_{i}_relu")(x)
    return x


def unet(num_blocks: int, channels: int, depth: int = 5, size: int = 192, image_channels: int = 3) -> keras.Model:
    """Makes a U-Net for square images of a size that is a multiple of 2**depth.

    Args:
        num_blocks: B, convolution blocks a level.
        channels: C, channels of the first level; each level below has twice as many as the one above.
        depth: levels above the lowest one.
        size: height and width of an image.
        image_channels: of the inputs; the output has one.
    """
    images = x = keras.Input((size, size, image_channels), name="images")
    skips = []
    for level in range(depth):
        x = blocks(x, [channels * 2**level] * num_blocks, f"down_{level}")
        skips.append(x)
        x = keras.layers.MaxPooling2D(name=f"pool_{level}")(x)
    x = blocks(x, [channels * 2**depth] * (num_blocks - 1) + [channels * 2**depth // 2], "lowest")
    for level in reversed(range(depth)):
        x = keras.layers.UpSampling2D(name=f"double_{level}")(x)
        x = keras.layers.Concatenate(name=f"join_{level}")([skips[level], x])
        x = blocks(x, [channels * 2**level // 2] * num_blocks, f"up_{level}")
    outputs = keras.layers.Conv2D(1, 1, use_bias=False, name="output")(x)
    return keras.Model(images, outputs, name="unet")


def load_crops(size: int, num_train: int, num_test: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns grey crops with values from 0 to 1: some of the left three quarters of the photos, some of the rest."""
    photos = np.stack(sklearn.datasets.load_sample_images().images).mean(axis=-1, keepdims=True) / 255
    boundary = 3 * photos.shape[2] // 4
    numbers = np.random.default_rng(0)

    def crops(photos: np.ndarray, count: int) -> np.ndarray:
        places = numbers.integers((len(photos), *np.subtract(photos.shape[1:3], size)), size=(count, 3))
        return np.stack([photos[i, y : y + size, x : x + size] for i, y, x in places]).astype("float32")

    return crops(photos[:, :, :boundary], num_train), crops(photos[:, :, boundary:], num_test)


def compiled_model(strategy: tf_gpipe.GPipeStrategy, size: int) -> keras.Model:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = unet(num_blocks=1, channels=16, depth=DEPTH, size=size, image_channels=1)
        model.compile(keras.optimizers.Adam(0.003), "mse")
    return model


def decibels(difference: np.ndarray) -> float:
    """Peak signal-to-noise ratio of images that differ so from the clean ones."""
    return -10 * np.log10(np.mean(np.square(difference)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a U-Net that removes noise, in a pipeline on logical CPUs.")
    parser.add_argument("--quick", action="store_true", help="six epochs on 256 small crops (default: ten on 512)")
    arguments = parser.parse_args()
    devices = tf_gpipe.set_logical_cpus(NUM_STAGES)
    size, num_train, epochs = (32, 256, 6) if arguments.quick else (64, 512, 10)
    train, test = load_crops(size, num_train, num_test=64)
    numbers = np.random.default_rng(1)
    noise, test_noise = (numbers.normal(0, NOISE, crops.shape).astype("float32") for crops in (train, test))

    # A step from the same weights with one stage and with all of them.
    weights = []
    for num_stages in (1, NUM_STAGES):
        strategy = tf_gpipe.GPipeStrategy(num_stages, num_micro_batches=8, devices=devices[:num_stages])
        model = compiled_model(strategy, size)
        model.train_on_batch((train + noise)[:32], noise[:32])
        weights.append(model.get_weights())
    difference = max(np.max(np.abs(one - many)) for one, many in zip(*weights, strict=True))
    plan = strategy.plan(model)
    stage_of = {name: stage.index for stage in plan.stages for name in stage.operations}
    print(plan)
    for level in range(DEPTH):
        print(f"skip {level}: from stage {stage_of[f'down_{level}_0_relu']} to stage {stage_of[f'join_{level}']}")
    print(f"{NUM_STAGES} stages and 1 stage: largest difference of any weight {difference:.1e}")

    model.fit(train + noise, noise, batch_size=32, epochs=epochs, verbose=2)
    left = test_noise - model.predict(test + test_noise, batch_size=32, verbose=0)
    print(f"noisy {decibels(test_noise):.1f} dB, denoised {decibels(left):.1f} dB")
    if arguments.quick:
        print("--quick: too short to learn, it only shows that all of it runs")


if __name__ == "__main__":
    main()
