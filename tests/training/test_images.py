"""Images out of columns, against Pillow and TensorFlow."""

import importlib.util

import numpy as np
import pytest

from elephant.errors import ConfigurationError, DataError
from elephant.training import images
from elephant.training.images import decode_images, resized

tf = pytest.importorskip("tensorflow")

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 7, 4), dtype=np.uint8)


def encoded(pixels, kind="png"):
    return (tf.io.encode_png if kind == "png" else tf.io.encode_jpeg)(pixels).numpy()


def image_rows(*pictures):
    """Returns the columns of Spark's image source, which has blue first."""
    order = {1: [0], 3: [2, 1, 0], 4: [2, 1, 0, 3]}
    return {
        "height": np.array([picture.shape[0] for picture in pictures]),
        "width": np.array([picture.shape[1] for picture in pictures]),
        "nChannels": np.array([picture.shape[2] for picture in pictures]),
        "data": np.array([picture[:, :, order[picture.shape[2]]].tobytes() for picture in pictures], object),
    }


@pytest.fixture(params=["Pillow", "TensorFlow"])
def library(request, monkeypatch):
    if request.param == "Pillow":
        pytest.importorskip("PIL")
    else:
        found = importlib.util.find_spec
        monkeypatch.setattr(images.importlib.util, "find_spec", lambda name: None if name == "PIL" else found(name))
    return request.param


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_images_when_they_are_png_files_then_are_the_pixels_that_were_written(library, depth):
    picture = PIXELS[:, :, :depth]
    decoded = decode_images(np.array([encoded(picture)] * 2, object), channels=depth)
    assert decoded.dtype == np.uint8
    np.testing.assert_array_equal(decoded, np.stack([picture, picture]))


def test_images_when_they_are_jpeg_files_then_are_what_tensorflow_decodes(library):
    smooth = np.linspace(0, 255, 16 * 16 * 3).reshape(16, 16, 3).astype(np.uint8)
    content = encoded(smooth, "jpeg")
    decoded = decode_images([content])
    # TensorFlow's default transform is the fast one, whose results differ by some steps.
    expected = tf.io.decode_jpeg(content, dct_method="INTEGER_ACCURATE").numpy().astype(int)
    tolerance = 1 if library == "Pillow" else 8
    assert np.abs(decoded[0].astype(int) - expected).max() <= tolerance


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_images_when_they_come_from_the_image_source_then_red_is_first(depth):
    picture = PIXELS[:, :, :depth]
    np.testing.assert_array_equal(decode_images(image_rows(picture, picture), channels=depth)[1], picture)


def test_images_when_other_channels_are_wanted_then_grey_spreads_and_transparency_goes():
    grey, colour, clear = PIXELS[:, :, :1], PIXELS[:, :, :3], PIXELS
    decoded = decode_images(image_rows(grey, colour, clear))
    np.testing.assert_array_equal(decoded[0], np.repeat(grey, 3, axis=2))
    np.testing.assert_array_equal(decoded[1], colour)
    np.testing.assert_array_equal(decoded[2], colour)
    opaque = decode_images(image_rows(colour), channels=4)[0]
    np.testing.assert_array_equal(opaque[:, :, 3], 255)
    shades = decode_images(image_rows(colour), channels=1)[0, :, :, 0].astype(int)
    expected = tf.image.rgb_to_grayscale(colour).numpy()[:, :, 0].astype(int)
    assert np.abs(shades - expected).max() <= 1


@pytest.mark.parametrize("size", [(10, 14), (3, 4), (5, 7), (1, 20)])
def test_images_when_resized_then_equal_tensorflows_bilinear(size):
    expected = tf.image.resize(PIXELS[:, :, :3], size, antialias=False).numpy()
    assert np.abs(resized(PIXELS[:, :, :3], size) - expected).max() <= 0.5 + 1e-3
    decoded = decode_images([encoded(PIXELS[:, :, :3]), encoded(PIXELS[:3, :, :3])], size=size)
    np.testing.assert_array_equal(decoded[0], resized(PIXELS[:, :, :3], size))
    np.testing.assert_array_equal(decoded[1], resized(PIXELS[:3, :, :3], size))


def test_images_when_they_cannot_be_decoded_then_the_error_says_why(library, monkeypatch):
    with pytest.raises(DataError, match="Received: 5 bytes in row 1 of the batch that are none"):
        decode_images([encoded(PIXELS), b"hello"])
    with pytest.raises(
        DataError, match=r"images of one size. Received: \(5, 7\) in row 0 .* and \(3, 7\) in row 1 of .*Give size"
    ):
        decode_images([encoded(PIXELS), encoded(PIXELS[:3])])
    with pytest.raises(ConfigurationError, match="channels: expected 1, 3 or 4. Received: 2"):
        decode_images([encoded(PIXELS)], channels=2)
    broken = image_rows(PIXELS)
    broken["data"][0] = broken["data"][0][1:]
    with pytest.raises(DataError, match="expected 5 x 7 x 4 bytes .* Received: 139 bytes"):
        decode_images(broken)
    assert decode_images([], size=(2, 3)).shape == (0, 2, 3, 3)


def test_images_when_spark_could_not_decode_one_then_the_error_names_its_file():
    rows = image_rows(PIXELS[..., :3])
    broken = {name: np.append(column, -1) for name, column in rows.items() if name != "data"}
    broken |= {"data": np.array([rows["data"][0], b""], object), "origin": np.array(["a.png", "dir/b.png"], object)}
    with pytest.raises(DataError, match="one from dir/b.png that Spark could not decode, in row 1 of the batch"):
        decode_images(broken)


def test_images_when_the_paths_of_files_are_given_then_errors_name_the_file():
    paths = np.array(["file:/a.png", "file:/dir/b.png"], object)
    with pytest.raises(DataError, match=r"\(5, 7\) in row 0 of the batch from file:/a.png and .* from file:/dir/b.png"):
        decode_images([encoded(PIXELS), encoded(PIXELS[:3])], paths=paths)
    with pytest.raises(DataError, match="5 bytes from file:/dir/b.png in row 1 of the batch that are none"):
        decode_images([encoded(PIXELS), b"hello"], paths=paths)


def test_images_when_no_library_is_there_then_says_what_to_install(monkeypatch):
    monkeypatch.setattr(images.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="expected Pillow or TensorFlow"):
        decode_images([encoded(PIXELS)])
