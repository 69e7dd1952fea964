"""Images in columns, decoded on the workers: files as Spark's ``binaryFile`` source reads them, or its ``image`` one.

Both are for preprocessing functions::

    KerasEstimator(
        model=model,
        featuresCol=["content", "path"],
        preprocessing=lambda batch: elephant.decode_images(batch["content"], size=(32, 32), paths=batch["path"]),
    )
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from elephant.errors import ConfigurationError, DataError

# How bright red, green and blue are: ITU-R BT.601, as image libraries have it.
_BRIGHTNESS = np.array([0.299, 0.587, 0.114], np.float32)


def decode_images(
    images: Sequence[bytes] | np.ndarray | Mapping[str, np.ndarray],
    *,
    size: tuple[int, int] | None = None,
    channels: int = 3,
    paths: Sequence[str] | np.ndarray | None = None,
) -> np.ndarray:
    """Returns the images of a batch's column as one array.

    Args:
        images: A column of encoded files (JPEG, PNG, GIF, BMP), as ``spark.read.format("binaryFile")`` has them in
            ``content``; or a column of ``spark.read.format("image")``: a dictionary with ``height``, ``width``,
            ``nChannels`` and ``data``.
        size: Height and width, in pixels, that images are resized to, bilinearly; None takes images of one size.
        channels: 1 for grey, 3 for red, green and blue, 4 with transparency.
        paths: Of the files, by which errors name them; the image source has them in ``origin``.

    Returns:
        Colours from 0 to 255, uint8 (rows, height, width, channels).

    Raises:
        ConfigurationError: Another number of channels, or no library that decodes files.
        DataError: A file that is no image, or images of several sizes where none is given.

    Examples:
        >>> image = {name: np.array([value]) for name, value in {"height": 1, "width": 2, "nChannels": 1}.items()}
        >>> decode_images({**image, "data": np.array([b"\\x07\\xff"], object)}, channels=1).tolist()
        [[[[7], [255]]]]
    """
    if channels not in (1, 3, 4):
        raise ConfigurationError(f"channels: expected 1, 3 or 4. Received: {channels!r}.")
    if paths is None and isinstance(images, Mapping):
        paths = images.get("origin")
    if isinstance(images, Mapping):
        decoded = [_of_image_source(images, row, _origin(paths, row)) for row in range(len(images["height"]))]
    else:
        decode = _decoder()
        decoded = [_decoded(decode, content, row, _origin(paths, row)) for row, content in enumerate(images)]
    decoded = [_with_channels(image, channels) for image in decoded]
    if size is not None:
        decoded = [resized(image, size) for image in decoded]
    other = next((row for row, image in enumerate(decoded) if image.shape != decoded[0].shape), None)
    if other is not None:
        found = [f"{decoded[row].shape[:2]} in row {row} of the batch{_origin(paths, row)}" for row in (0, other)]
        raise DataError(
            f"decode_images: expected images of one size. Received: {' and '.join(found)} (height, width). "
            "Give size=(height, width), which they are resized to."
        )
    return np.stack(decoded) if decoded else np.empty((0, *(size or (0, 0)), channels), np.uint8)


def resized(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Returns an image in another size: each pixel is the bilinear mix of the four around its place.

    Pixels are areas, not points: the half-pixel centres of OpenCV, PIL and TensorFlow 2.

    Args:
        image: uint8 (height, width, channels).
        size: Height and width in pixels.

    Examples:
        >>> resized(np.array([[[0], [100]]], np.uint8), (1, 4))[0, :, 0].tolist()
        [0, 25, 75, 100]
    """
    if image.shape[:2] == tuple(size):
        return image
    below, above, part = _places(image.shape[0], size[0])
    left, right, share = _places(image.shape[1], size[1])
    pixels = image.astype(np.float32)
    rows = pixels[below] + (pixels[above] - pixels[below]) * part[:, np.newaxis, np.newaxis]
    mixed = rows[:, left] + (rows[:, right] - rows[:, left]) * share[np.newaxis, :, np.newaxis]
    return np.clip(np.rint(mixed), 0, 255).astype(np.uint8)


def _places(before: int, after: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns, for each pixel of the new side, the two of the old one that it lies between, and how far."""
    centres = np.clip((np.arange(after) + 0.5) * before / after - 0.5, 0, before - 1)
    first = np.floor(centres).astype(np.int64)
    return first, np.minimum(first + 1, before - 1), (centres - first).astype(np.float32)


def _origin(paths: Sequence[str] | np.ndarray | None, row: int) -> str:
    """Returns where an image comes from, for a message, as far as that is known."""
    return "" if paths is None else f" from {paths[row]}"


def _of_image_source(images: Mapping[str, np.ndarray], row: int, origin: str) -> np.ndarray:
    height, width, depth = (int(images[name][row]) for name in ("height", "width", "nChannels"))
    data = images["data"][row]
    if height * width * depth != len(data) or depth not in (1, 3, 4):
        if height < 0:
            # So the source says that it could not read a file.
            raise DataError(
                f"decode_images: expected an image in every row. Received: one{origin} that Spark could not decode, in "
                f"row {row} of the batch. Read with option('dropInvalid', True), or mend the file."
            )
        raise DataError(
            f"decode_images: expected {height} x {width} x {depth} bytes of an image of 1, 3 or 4 channels, as "
            f"Spark's image source has them. Received: {len(data)} bytes{origin}, in row {row} of the batch."
        )
    pixels = np.frombuffer(data, np.uint8).reshape(height, width, depth)
    # OpenCV's order, which Spark keeps: blue, green, red, transparency.
    return pixels if depth == 1 else pixels[:, :, [2, 1, 0, *range(3, depth)]]


def _decoder() -> Any:
    """Returns a function from a file's bytes to uint8 (height, width, 1, 3 or 4)."""
    if importlib.util.find_spec("PIL") is not None:
        return _with_pillow
    if importlib.util.find_spec("tensorflow") is not None:
        return _with_tensorflow
    raise ConfigurationError(
        "decode_images: expected Pillow or TensorFlow on the executors, to decode files. Received: neither. "
        "Install pillow there."
    )


def _decoded(decode: Any, content: bytes, row: int, origin: str) -> np.ndarray:
    try:
        image: np.ndarray = decode(content)
    except Exception as error:
        raise DataError(
            f"decode_images: expected an encoded image in every row. Received: {len(content)} bytes{origin} in row "
            f"{row} of the batch that are none: {error}"
        ) from error
    return image


def _with_pillow(content: bytes) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        plain = image.mode if image.mode in ("L", "RGB", "RGBA") else "RGBA" if "A" in image.getbands() else "RGB"
        pixels = np.asarray(image.convert(plain))
    return pixels[:, :, np.newaxis] if pixels.ndim == 2 else pixels


def _with_tensorflow(content: bytes) -> np.ndarray:
    import tensorflow as tf

    pixels: np.ndarray = tf.io.decode_image(content, expand_animations=False).numpy()
    if pixels.shape[-1] == 2:
        return np.concatenate([np.repeat(pixels[:, :, :1], 3, axis=2), pixels[:, :, 1:]], axis=2)
    return pixels


def _with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    depth = image.shape[2]
    if depth == channels:
        return image
    if channels == 1:
        return np.rint(image[:, :, :3].astype(np.float32) @ _BRIGHTNESS).astype(np.uint8)[:, :, np.newaxis]
    colours = np.repeat(image, 3, axis=2) if depth == 1 else image[:, :, :3]
    if channels == 3:
        return colours
    return np.concatenate([colours, np.full((*colours.shape[:2], 1), 255, np.uint8)], axis=2)
