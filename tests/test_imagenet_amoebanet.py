"""The ImageNet example: what becomes of images, and the script from a data set on disk to an accuracy."""

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
import sklearn.datasets
import tensorflow as tf
import tensorflow_datasets as tfds

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import imagenet_amoebanet
from amoebanet import images
from amoebanet.images import Augmentation

DEFAULT = Augmentation()
PLAIN = Augmentation(crop="full", flip=False, colour=False)
MODEL = ["--image-size", "32", "--genotype", "B", "--cells", "3", "--filters", "4", "--no-auxiliary-head"]
RECIPE = ["--batch-size", "16", "--learning-rate", "0.1", "--average", "0.9", "--drop-path-keep", "0.8"]
PIPELINE = ["--stages", "2", "--micro-batches", "2", "--remat", "always"]


class Photos(tfds.core.GeneratorBasedBuilder):
    """Parts of scikit-learn's two photographs, as JPEG: left and right half of each are a class."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
            "label": tfds.features.ClassLabel(num_classes=4),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("image", "label")
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples(96, 0), "validation": self._generate_examples(20, 1)}

    def _generate_examples(self, count, seed):
        halves = [half for photo in photos() for half in (photo[:, :320], photo[:, 320:])]
        generator = np.random.default_rng(seed)
        for i in range(count):
            top, left = generator.integers(0, [340, 240])
            yield i, {"image": halves[i % 4][top : top + 80, left : left + 60], "label": i % 4}


def photos() -> list[np.ndarray]:
    return sklearn.datasets.load_sample_images().images


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Where the photographs are, in three files, as TensorFlow Datasets keeps them."""
    folder = tmp_path_factory.mktemp("tfds")
    tfds.disable_progress_bar()
    Photos(data_dir=folder).download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=3))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Images in folders: red and blue ones, PNG and JPEG."""
    root = tmp_path_factory.mktemp("folder")
    for split, count in (("train", 8), ("test", 3)):
        for label, colour in (("blue", [0, 0, 250]), ("red", [250, 0, 0])):
            (root / split / label).mkdir(parents=True)
            for i in range(count):
                image = np.full([40, 50, 3], colour, "uint8")
                encode = tf.io.encode_png if i % 2 else tf.io.encode_jpeg
                (root / split / label / f"{i}.{'png' if i % 2 else 'jpg'}").write_bytes(encode(image).numpy())
    return root


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Where scikit-learn's digits are, as TensorFlow Datasets keeps them."""
    root = tmp_path_factory.mktemp("digits")
    # Not imported: in a package, TensorFlow Datasets asks for a module that it does not install.
    program = runpy.run_path(str(Path(images.__file__).with_name("sklearn_digits.py")))
    program["SklearnDigits"](data_dir=root).download_and_prepare()
    return root


def batches(builder, epochs: range, seed: int = 0, augmentation: Augmentation = DEFAULT):
    options = {"epochs": epochs, "seed": seed, "augmentation": augmentation}
    return list(images.training_images(builder, 24, 10, **options).as_numpy_iterator())


def photo(size: int = 60) -> np.ndarray:
    return photos()[0][100 : 100 + size, 200 : 200 + size]


def made(image: np.ndarray, augmentation: Augmentation, seed: int = 0, size: int = 60) -> np.ndarray:
    image_of = images.training_image(size, augmentation)
    return image_of(tf.io.encode_png(image), tf.constant([seed, 1], tf.int64)).numpy()


# --- images ---


@pytest.mark.parametrize("augmentation", [DEFAULT, Augmentation(rand_augment=0.5, cutout=8)])
def test_an_example_depends_on_seed_epoch_and_place_only(data, augmentation):
    builder = images.open_data("photos", data)
    whole = batches(builder, range(3), augmentation=augmentation)
    resumed = batches(builder, range(1, 3), augmentation=augmentation)
    assert len(whole) == 3 * 9  # 96 images: the last six of an epoch do not fill a mini-batch
    for (x, y), (x_resumed, y_resumed) in zip(whole[9:], resumed, strict=True):
        np.testing.assert_array_equal(x, x_resumed)
        np.testing.assert_array_equal(y, y_resumed)
    assert np.any(whole[0][1] != whole[9][1])  # another order in another epoch
    assert np.any(whole[0][0] != batches(builder, range(1), seed=1, augmentation=augmentation)[0][0])


def test_an_epoch_has_every_image_once(data):
    builder = images.open_data("photos", data)
    epochs = images.training_images(builder, 24, 12, epochs=range(2), augmentation=PLAIN).unbatch()
    seen = [image.tobytes() for image, _ in epochs.as_numpy_iterator()]
    assert len(set(seen[:96])) == 96
    assert set(seen[:96]) == set(seen[96:])
    assert seen[:96] != seen[96:]


def test_only_the_crop_of_a_jpeg_is_decoded():
    data = tf.io.encode_jpeg(photos()[0]).numpy()
    whole = tf.io.decode_jpeg(data)
    upper_half = data[: len(data) // 2]
    with pytest.raises(tf.errors.InvalidArgumentError, match="Uncompress failed"):
        tf.io.decode_jpeg(upper_half)
    crop = images.decode(tf.constant(upper_half), lambda shape: tf.constant([10, 20, 50, 60]))
    np.testing.assert_allclose(crop, whole[10:60, 20:80], atol=4)  # colours are interpolated, but not across the edge


def test_pixels_are_from_minus_one_to_one():
    image = np.stack([np.zeros([4, 4, 3]), np.full([4, 4, 3], 255)]).reshape(8, 4, 3).astype("uint8")
    assert set(np.unique(made(image, PLAIN, size=8)[[0, -1]])) == {-1.0, 1.0}
    for seed in range(5):
        changed = made(photo(), Augmentation(rand_augment=0.5, cutout=9), seed)
        assert changed.min() >= -1
        assert changed.max() <= 1


def test_plain_images_are_not_changed():
    np.testing.assert_allclose(made(photo(), PLAIN), photo() / 127.5 - 1, atol=1e-6)


def test_half_of_the_images_are_mirrored():
    image = photo(12)
    plain = image / 127.5 - 1
    found = [made(image, Augmentation("full", colour=False), seed, 12) for seed in range(40)]
    mirrored = [np.allclose(x, plain[:, ::-1], atol=1e-6) for x in found]
    assert all(m or np.allclose(x, plain, atol=1e-6) for x, m in zip(found, mirrored, strict=True))
    assert 10 < sum(mirrored) < 30


def test_colours_are_shifted_as_a_whole():
    image = np.full([8, 8, 3], 128, "uint8")
    shifts = np.stack([made(image, Augmentation("full", flip=False), seed, 8)[0, 0] / 2 for seed in range(50)])
    luma = shifts @ [0.299, 0.587, 0.114] - (128 / 255 - 0.5)
    assert np.abs(luma).max() <= 32 / 255 + 1e-3
    assert np.abs(luma).max() > 16 / 255
    assert np.abs(shifts[:, 2] - shifts @ [0.299, 0.587, 0.114]).max() <= 0.1772 + 1e-3  # 1.772 times 0.1
    assert np.ptp(shifts, axis=1).min() > 0


def test_cutout_makes_a_grey_square():
    for seed in range(5):
        grey = np.all(made(photo(), Augmentation("full", False, False, cutout=20), seed) == 0, axis=-1)
        rows, columns = np.flatnonzero(grey.any(1)), np.flatnonzero(grey.any(0))
        assert grey.sum() == len(rows) * len(columns)
        assert 10 <= len(rows) <= 20
        assert 10 <= len(columns) <= 20


def test_evaluation_takes_the_middle():
    image = np.zeros([80, 160, 3], "uint8")
    image[5:75, 10:150] = 255  # 87.5 % of both sides
    assert np.all(images.evaluation_image(tf.io.encode_png(image), 16, 0.875) == 1)


def test_images_in_folders(folder):
    builder = images.open_data(f"folder:{folder}")
    images.prepare(builder)
    assert images.num_classes(builder) == 2
    assert images.evaluation_split(builder) == "test"
    for x, y in images.training_images(builder, 16, 4, epochs=range(2), augmentation=PLAIN).as_numpy_iterator():
        np.testing.assert_array_equal(x[:, 8, 8, 0] > 0, y[:, 1] == 1)  # red is the second class
    assert sum(len(x) for x, _ in images.evaluation_images(builder, 16, 4)) == 6


def test_digits(digits):
    builder = images.open_data("sklearn_digits", digits)
    assert images.steps_per_epoch(builder, 100) == 14
    with pytest.raises(ValueError, match="at most 1440 images"):
        images.steps_per_epoch(builder, 1441)
    (x, y), *_ = images.evaluation_images(builder, 8, 357).as_numpy_iterator()
    assert x.shape == (357, 8, 8, 3)
    assert np.all(y.sum(axis=0) > 30)


# --- the script ---


def command(data: str, *arguments: object) -> list[str]:
    return [
        sys.executable,
        imagenet_amoebanet.__file__,
        "--data",
        data,
        *MODEL,
        *RECIPE,
        *PIPELINE,
        *map(str, arguments),
    ]


def run(data: str, *arguments: object, log_level: str = "3") -> tuple[str, str]:
    """What the script prints, and what TensorFlow logs from a level on."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": log_level}
    done = subprocess.run(command(data, *arguments), capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout, done.stderr


def weights_in(path: Path) -> dict[str, np.ndarray]:
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> tuple[Path, str]:
    """A training of two epochs: its folder, and what it printed."""
    output = tmp_path_factory.mktemp("trained")
    printed, _ = run("photos", "--data-dir", data, "--epochs", 2, "--output", output, "--logs", output / "logs")
    return output, printed


def test_training(trained):
    output, printed = trained
    assert "Going on" not in printed
    assert "9 operations of 'amoebanet_b'" in printed
    assert printed.count("val_top_5: 1.0000") == 2  # there are four classes
    too_short = "Too short to learn: 12 steps, where --average 0.9 needs 30. Take a smaller --average, 0 for none,"
    assert printed.count(too_short) == 2  # before the first epoch and after the last
    assert re.search(r"^top-1 \d+\.\d %, top-5 100\.0 %$", printed, re.MULTILINE)
    assert list(output.glob("logs/train/events*"))


def test_a_killed_training_goes_on_to_the_same_weights(trained, data, tmp_path):
    arguments = ["--data-dir", data, "--epochs", 2, "--output", tmp_path]
    process = subprocess.Popen(command("photos", *arguments), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 600
        while not (tmp_path / "checkpoints" / "checkpoint").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "final.weights.h5").exists()

    printed, _ = run("photos", *arguments)
    assert f"Going on from the checkpoint of epoch 1 of 2 in {tmp_path}\n" in printed
    assert "Epoch 1/2" not in printed
    assert "Epoch 2/2" in printed
    resumed, whole = weights_in(tmp_path / "final.weights.h5"), weights_in(trained[0] / "final.weights.h5")
    assert resumed.keys() == whole.keys()
    for name, values in whole.items():
        np.testing.assert_allclose(resumed[name], values, rtol=0, atol=1e-6, err_msg=name)


def test_transfer(trained, folder, tmp_path, capsys):
    final = trained[0] / "final.weights.h5"
    always = [*MODEL, *RECIPE, "--stages", "1", "--micro-batches", "1"]
    begin = ["--epochs", "0", "--init-from", str(final), "--output", str(tmp_path)]
    imagenet_amoebanet.main(["--data", f"folder:{folder}", *always, *begin])
    assert re.search(r"^top-1 \d+\.\d %, top-5 100\.0 %$", capsys.readouterr().out, re.MULTILINE)
    made = weights_in(tmp_path / "final.weights.h5")
    for name, values in weights_in(final).items():
        if name.startswith("layers/classifier"):
            assert made[name].shape[-1:] == (2,)  # classes of the folder
        elif name.startswith("layers"):
            np.testing.assert_array_equal(made[name], values)


def test_evaluation(trained, data, tmp_path, capsys):
    arguments = ["--data", "photos", "--data-dir", str(data), *MODEL, *RECIPE, *PIPELINE, "--evaluate", "--output"]
    refused = refusal([*arguments, str(tmp_path / "none")], capsys)
    assert f"Expected a checkpoint in {tmp_path / 'none'}. Received: none. Train first." in refused
    assert not (tmp_path / "none").exists()
    imagenet_amoebanet.main([*arguments, str(trained[0])])
    printed = capsys.readouterr().out.splitlines()
    assert f"Evaluating the checkpoint of epoch 2 in {trained[0]}" in printed
    assert printed[-1] == trained[1].splitlines()[-1]


@pytest.mark.parametrize(("epochs", "said"), [(2, "All 2 epochs are done"), (1, "All 1 epochs are done (2 in {})")])
def test_a_training_that_is_over_is_evaluated(trained, data, epochs, said, capsys):
    arguments = ["--data", "photos", "--data-dir", str(data), *MODEL, *RECIPE, *PIPELINE, "--output", str(trained[0])]
    imagenet_amoebanet.main([*arguments, "--epochs", str(epochs)])
    printed = capsys.readouterr().out.splitlines()
    assert f"{said.format(trained[0])}: evaluating" in printed
    assert printed[-1] == trained[1].splitlines()[-1]


def test_an_output_of_another_model_is_refused(trained, data, folder, capsys):
    always = ["--data-dir", str(data), *MODEL, *RECIPE, *PIPELINE, "--output", str(trained[0])]
    size = "--image-size"
    said = "Expected the model that {} was made with: {}. Received: {}. Give the same arguments, or take another"
    before = {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")}
    for arguments, made, received in (
        (["--average", "0", "--filters", "8"], "--filters 4, --average 0.9", "--filters 8, --average 0.0"),
        (["--cells", "6", "--genotype", "D"], "--genotype B, --cells 3", "--genotype D, --cells 6"),
        (["--image-size", "67", "--auxiliary-head"], f"{size} 32, --no-auxiliary-head", f"{size} 67, --auxiliary-head"),
        (["--data", f"folder:{folder}"], "--data of 4 classes", "--data of 2 classes"),
        (["--evaluate", "--layout", "torch"], "--layout tf", "--layout torch"),
    ):
        printed = refusal([*always, "--data", "photos", *arguments], capsys)
        assert said.format(trained[0], made, received) in printed
    assert before == {path: path.stat().st_mtime_ns for path in trained[0].rglob("*")}


def test_an_output_that_does_not_say_how_its_model_was_made_goes_on(trained, data, tmp_path, capsys):
    output = shutil.copytree(trained[0], tmp_path / "run")
    (output / "model.json").unlink()
    always = ["--data", "photos", "--data-dir", str(data), *MODEL, *RECIPE, *PIPELINE, "--output", str(output)]
    imagenet_amoebanet.main([*always, "--evaluate"])
    assert capsys.readouterr().out.splitlines()[-1] == trained[1].splitlines()[-1]


@pytest.mark.soak
def test_mixed_precision_and_xla(digits, tmp_path):
    flags = "--image-size 20 --crop full --evaluation-crop 1 --no-flip --no-colour --warm-up-epochs 0 --epochs 2"
    flags += " --learning-rate 0.01 --batch-size 51 --micro-batches 3"  # without a rest: XLA compiles for each size
    more = ["--data-dir", digits, "--output", tmp_path, "--mixed-precision", "--jit-compile"]
    printed, logged = run("sklearn_digits", *flags.split(), *more, log_level="0")
    assert "5.18 kB\n" in printed  # what the stem sends: 9x9x32 values of two bytes
    assert "Compiled cluster using XLA" in logged
    first, second = (float(loss) for loss in re.findall(r" - loss: (\S+)", printed))
    assert second < first - 0.5


def test_plan(capsys):
    arguments = ["--plan", "--genotype", "B", "--cells", "18", "--filters", "512", "--image-size", "480"]
    arguments += ["--batch-size", "128", "--micro-batches", "32"]
    imagenet_amoebanet.main([*arguments, "--stages", "4", "--device-memory", "8"])
    printed = capsys.readouterr().out
    assert printed.startswith("559,063,693 parameters")
    assert "It does not fit: stage 1 needs most" in printed
    imagenet_amoebanet.main([*arguments, "--stages", "8", "--device-memory", "80"])
    assert "It fits: stage" in capsys.readouterr().out


# --- odd flags ---

COUNT = "a whole number, at least 1"
PART = "a number, above 0 and at most 1"
FROM_0_TO_1 = "a number, at least 0 and at most 1"
POSITIVE = "a number, above 0 and below inf"
NOT_NEGATIVE = "a number, at least 0 and below inf"


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--image-size", "18", "a whole number, at least 19"),
        ("--image-size", "66", "at least 67 pixels for the auxiliary head"),
        ("--evaluation-crop", "0", PART),
        ("--evaluation-crop", "1.1", PART),
        ("--rand-augment", "-0.1", FROM_0_TO_1),
        ("--cutout", "-1", "a whole number, at least 0"),
        ("--cells", "4", "a whole number, at least 3 and a multiple of 3"),
        ("--filters", "0", "a whole number, at least 4 and a multiple of 4"),
        ("--filters", "6", "a whole number, at least 4 and a multiple of 4"),
        ("--dropout-keep", "0", PART),
        ("--drop-path-keep", "nan", PART),
        ("--epochs", "-1", "a whole number, at least 0"),
        ("--batch-size", "0", COUNT),
        ("--learning-rate", "inf", POSITIVE),
        ("--decay", "0", PART),
        ("--warm-up-epochs", "-1", NOT_NEGATIVE),
        ("--epsilon", "0", POSITIVE),
        ("--weight-decay", "much", NOT_NEGATIVE),
        ("--label-smoothing", "2", FROM_0_TO_1),
        ("--average", "1", "a number, at least 0 and below 1"),
        ("--seed", "-1", "a whole number, at least 0 and below 4294967296"),
        ("--stages", "0", COUNT),
        ("--stages", "20", "at most 19, the model's operations"),
        ("--micro-batches", "0", COUNT),
        ("--device-memory", "0", POSITIVE),
        ("--init-from", "/nowhere.weights.h5", "a file"),
        ("--output", __file__, "a folder, which may be a new one"),
    ],
)
def test_odd_flags_are_refused(flag, value, expected, monkeypatch, capsys):
    monkeypatch.setattr(imagenet_amoebanet, "set_up_devices", lambda *arguments: pytest.fail("not refused"))
    printed = refusal([flag, value], capsys)
    assert f"error: argument {flag}: Expected {expected}. Received: '{value}'" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "no_such_data"], "no_such_data"),
        (["--data", "folder:/nowhere"], "/nowhere/train/cat/1.jpg. Received: no such folder."),
        (["--data", "photos", "--devices", "gpu"], "Received: 'gpu', and 0 of them here. Take --devices cpu."),
        (["--data", "photos", "--batch-size", "97"], "Expected mini-batches of at most 96 images"),
    ],
)
def test_data_and_devices_that_are_not_there_are_refused(arguments, message, data, capsys):
    assert message in refusal(["--data-dir", str(data), *MODEL, *PIPELINE, *arguments], capsys)


def test_data_must_have_a_split_to_train_on(folder, tmp_path, capsys):
    shutil.copytree(folder / "test", tmp_path / "test")
    message = "with images in a split to train on, 'train'. Received: 'image_folder' with images in ['test']."
    assert message in refusal(["--data", f"folder:{tmp_path}", *MODEL, *PIPELINE], capsys)


def test_images_must_be_at_the_depth_that_is_read(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "photos")
    for root in (tmp_path, folder / "train"):  # too high, too low
        printed = refusal(["--data", f"folder:{root}", *MODEL, *PIPELINE], capsys)
        assert f"such as {root}/train/cat/1.jpg. Received: a folder without any there." in printed


def test_a_split_needs_images(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "photos", ignore=lambda path, names: names if path.endswith("red") else [])
    for image in (tmp_path / "photos" / "test" / "blue").iterdir():
        image.unlink()
    printed = refusal(["--data", f"folder:{tmp_path / 'photos'}", "--batch-size", "8", *MODEL, *PIPELINE], capsys)
    assert "Expected a data set with images in a split to evaluate on, validation or test." in printed
    assert "images in ['train']." in printed


def small_model(arguments, num_classes: int) -> keras.Model:
    """Instead of an AmoebaNet, where it does not matter what is trained."""
    inputs = keras.Input([arguments.image_size, arguments.image_size, 3])
    features = keras.layers.GlobalAveragePooling2D()(inputs)
    return keras.Model(inputs, {"logits": keras.layers.Dense(num_classes, name="logits")(features)})


def test_a_broken_image_is_named(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(imagenet_amoebanet, "make_model", small_model)
    photos = shutil.copytree(folder, tmp_path / "photos")
    broken = photos / "train" / "red" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:100])
    flags = ["--epochs", "1", "--stages", "1", "--micro-batches", "1", "--output", str(tmp_path / "run")]
    printed = refusal(["--data", f"folder:{photos}", *MODEL, *RECIPE[:-2], *flags], capsys)
    [message] = printed.splitlines()
    assert f"error: Expected files that can be read as images. Received: {broken}. Mend or remove it, and" in message
    (photos / "test" / "blue" / "1.png").write_bytes(b"no image")
    with (
        pytest.raises(images.BrokenFileError, match=rf"Received: {photos}/test/blue/1.png and 1 more like it\."),
        images.naming_broken_files(images.open_data(f"folder:{photos}")),
    ):
        raise tf.errors.InvalidArgumentError(None, None, "what TensorFlow says of the first")


def test_other_errors_than_of_broken_images_stay(folder, data):
    for builder in (images.open_data(f"folder:{folder}"), images.open_data("photos", data)):
        with pytest.raises(tf.errors.OpError, match="out of memory"), images.naming_broken_files(builder):
            raise tf.errors.ResourceExhaustedError(None, None, "out of memory")


def test_imagenet_without_its_files_is_refused_by_what_tfds_says(tmp_path, capsys):
    folders = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "run")]
    printed = refusal(["--data", "imagenet2012", *folders], capsys)
    assert printed.startswith(f"{Path(sys.argv[0]).name}: error: Expected the files of 'imagenet2012'. Received: ")
    assert "ILSVRC2012_img_train.tar" in printed
    assert "https://image-net.org/download-images" in printed
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def refusal(arguments: list[str], capsys) -> str:
    """What the script says of wrong arguments."""
    with pytest.raises(SystemExit) as ended:
        imagenet_amoebanet.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err
