"""Image files are found in folders and tars, decoded whatever their kind, and skipped when bad."""

import os
import pickle
import tarfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from fst.commands import data as commands
from fst.data import DataError, ImageData, image_decoding
from fst.data.image_decoding import ImageError, View, decoding
from fst.data.images import Skipped, find_images, find_split
from image_examples import (
    CLASSES,
    bad_members,
    encoded,
    members,
    picture,
    write_data_set,
    write_folder,
    write_tar,
)


def content(images) -> dict[str, bytes]:
    return {images.files.names[row]: images.files.read(int(row)) for row in images.rows}


@pytest.mark.parametrize("layout", ["folder", "tar", "shards", "nested tar"])
def test_every_layout_gives_the_same_images(tmp_path, layout):
    files = members()
    listed = list(files.items())
    other = [("apple/notes.txt", b"x"), ("apple/._0.png", b"x"), ("readme.md", b"x")]
    other += [(".ipynb_checkpoints/0.png", b"x"), ("apple/.thumbnails/0.png", b"x")]
    if layout == "folder":
        write_folder(tmp_path / "train", files | dict(other))
        (tmp_path / "train" / "empty").mkdir()
    elif layout == "tar":
        write_tar(tmp_path / "train.tar", listed[::-1] + other)
    elif layout == "shards":
        write_tar(tmp_path / "train-000.tar", listed[::2] + other)
        write_tar(tmp_path / "train-001.tar", listed[1::2])
    else:
        inside = [(f"./train/{name}", data) for name, data in listed]
        write_tar(tmp_path / "train.tar", inside)
    images = find_split(tmp_path, "train")
    assert images.class_names == CLASSES
    assert [name.removeprefix("train/") for name in images.names] == sorted(files)
    assert [CLASSES[label] for label in images.labels] == [n.split("/")[0] for n in sorted(files)]
    assert list(content(images).values()) == [files[name] for name in sorted(files)]
    empty = (Skipped("train/empty", "holds no image"),) if layout == "folder" else ()
    assert images.files.problems == empty  # said, for it may have been meant as a class


def test_a_linked_class_folder_counts(tmp_path):
    write_data_set(tmp_path / "real")
    (tmp_path / "train").mkdir()
    for kind in CLASSES:
        (tmp_path / "train" / kind).symlink_to(tmp_path / "real" / "train" / kind)
    assert find_split(tmp_path, "train").counts.tolist() == [4, 4, 4]


def test_the_last_member_of_a_name_counts(tmp_path):
    first, last = encoded(picture(number=7)), encoded(picture(number=8))
    write_tar(tmp_path / "train.tar", [*members().items(), ("pear/x.png", first),
                                       ("pear/x.png", last)])  # fmt: skip
    images = find_split(tmp_path, "train")
    assert images.names.count("pear/x.png") == 1
    assert content(images)["pear/x.png"] == last


def test_a_member_that_points_out_of_the_tar_is_only_read(tmp_path):
    inside = tmp_path / "deep" / "data"
    evil = {"../pear/evil.png": encoded(picture()), "/plum/root.png": encoded(picture())}
    write_tar(inside / "train.tar", members() | evil | {"../../stray.png": b"x"})
    images = find_split(inside, "train")
    assert {"pear/evil.png", "plum/root.png"} < set(images.names)
    assert [problem.name for problem in images.files.problems] == ["train.tar: stray.png"]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data", "deep", "train.tar"]


def test_a_tar_that_was_cut_short_gives_what_is_whole(tmp_path):
    path = write_tar(tmp_path / "train.tar", members())
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        last = tar.getmembers()[-1]
    for cut, expected in ((last.offset_data + 100, 2), (last.offset + 100, 1), (last.offset, 1)):
        path.write_bytes(whole[:cut])
        images = find_split(tmp_path, "train")
        assert len(images) == len(members()) - 1
        assert len(images.files.problems) == expected
        assert images.files.problems[-1].reason.startswith("ends too early or is damaged after 11")
    path.write_bytes(whole[: last.offset] + b"?" * 512 + whole[last.offset + 512 :])
    assert len(find_split(tmp_path, "train").files.problems) == 1


def test_images_are_read_at_random_from_many_threads_and_after_pickling(tmp_path):
    made = members(10)
    write_tar(tmp_path / "train.tar", made)
    images = pickle.loads(pickle.dumps(find_split(tmp_path, "train")))
    rows = np.random.default_rng(0).integers(len(images), size=500).tolist()
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(images.files.read, rows))
    assert read == [made[images.names[row]] for row in rows]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda f: None, "there is no such folder"),
        (lambda f: f.write_text("x"), "is a file; expected a folder with train/CLASS"),
        (lambda f: write_folder(f, {"cats/1.png": b"x"}), "holds no train images.*it holds cats"),
        (lambda f: write_folder(f, {"train/a/1.txt": b"x"}), "train: holds no image"),
        (lambda f: write_folder(f, {"train/1.png": b"x"}), "none in a class folder: train/1.png"),
        (lambda f: write_folder(f, {"train/a/1.png": b"x"}), "one class only, 'a'"),
        (lambda f: write_tar(f / "train.tar", {"a/1.png": b"x"}), "one class only, 'a'"),
        (lambda f: write_folder(f, {"train.tar": b"no tar at all"}), "cannot be read as an uncom"),
        (lambda f: write_folder(f, {"train.tar": b""}), "cannot be read as an uncompressed tar"),
    ],
)
def test_what_is_missing_is_said(tmp_path, make, message):
    make(tmp_path / "data")
    with pytest.raises(DataError, match=f"data.*{message}"):
        find_split(tmp_path / "data", "train")


def test_a_compressed_tar_is_refused_and_two_layouts_at_once_too(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a/1.png"))
    with pytest.raises(DataError, match="train.tar: is compressed, .*; decompress it"):
        find_split(tmp_path, "train")
    write_folder(tmp_path / "train", members())
    with pytest.raises(DataError, match="more than once .train, train.tar."):
        find_split(tmp_path, "train")


# Each kind of file, and what its pixels must be: the picture itself, or its luma.
RGB = picture()
GREY = RGB.convert("L")
SIXTEEN = Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)
CLEAR = RGB.convert("RGBA")
CLEAR.putalpha(Image.new("L", RGB.size, 0))
ORIENTED = Image.Exif()
ORIENTED[0x0112] = 6  # stored lying on its left side


def decode(data: bytes) -> Image.Image:
    with decoding(data) as image:
        return image


@pytest.mark.parametrize(
    ("data", "expected", "tolerance"),
    [
        (encoded(RGB), RGB, 0),
        (encoded(RGB, "BMP"), RGB, 0),
        (encoded(RGB, "WEBP", lossless=True), RGB, 0),
        (encoded(RGB, "TIFF"), RGB, 0),
        (encoded(GREY), GREY.convert("RGB"), 0),
        (encoded(SIXTEEN), GREY.convert("RGB"), 0),
        (encoded(SIXTEEN, "TIFF"), GREY.convert("RGB"), 0),
        (encoded(RGB.quantize(256)), RGB.quantize(256).convert("RGB"), 0),
        (encoded(GREY.convert("1")), GREY.convert("1").convert("RGB"), 0),
        (encoded(RGB.convert("RGBA")), RGB, 0),
        (encoded(CLEAR), Image.new("RGB", RGB.size, "white"), 0),
        (encoded(RGB, "JPEG", quality=95), RGB, 12),
        (encoded(RGB.convert("CMYK"), "JPEG", quality=95), RGB, 12),
        (encoded(RGB.convert("CMYK"), "TIFF"), RGB, 1),
        (encoded(RGB.convert("YCbCr"), "JPEG", quality=95), RGB, 12),
        (encoded(RGB.rotate(90, expand=True), exif=ORIENTED), RGB, 0),
        (encoded(RGB, "GIF", save_all=True, append_images=[GREY]), RGB, 40),
    ],
)
def test_every_kind_of_image_becomes_upright_rgb(data, expected, tolerance):
    image = decode(data)
    assert image.mode == "RGB"
    assert image.size == expected.size
    difference = np.asarray(image).astype(int) - np.asarray(expected).astype(int)
    assert np.abs(difference).max() <= tolerance


def test_bad_files_are_named_with_a_reason(monkeypatch):
    reasons = {}
    files = bad_members()
    files["apple/cut.png"] = encoded(picture())[:300]
    files["apple/float.tif"] = encoded(Image.new("F", (4, 4)), "TIFF")
    for name, data in files.items():
        with pytest.raises(ImageError) as caught:
            decode(data)
        reasons[name] = str(caught.value)
    assert reasons["pear/empty.png"] == "is empty"
    assert reasons["plum/words.jpg"] == "is not an image"
    assert "truncated" in reasons["apple/cut.jpg"]
    assert "floating-point" in reasons["apple/float.tif"]
    monkeypatch.setattr(image_decoding, "MEMORY", 1000 * image_decoding.BYTES_PER_PIXEL)
    with pytest.raises(ImageError) as caught:
        decode(encoded(picture(size=(40, 40))))
    assert str(caught.value) == "has 40 × 40 pixels, more than 1,000"
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match="could be decompression bomb"):
        decode(encoded(picture(size=(60, 60))))


@pytest.mark.parametrize("kind", ["EPS", "PDF", "ICO", "PCX"])
def test_other_kinds_are_not_opened_whatever_their_name(kind, monkeypatch):
    """PostScript is a program, which Pillow hands to Ghostscript."""
    monkeypatch.setattr("subprocess.check_call", pytest.fail)
    monkeypatch.setattr("subprocess.run", pytest.fail)
    with pytest.raises(ImageError, match="is not an image"):
        decode(encoded(RGB, kind))


def test_all_threads_together_keep_to_the_limit(monkeypatch):
    """Each alone would fit; a small one need not wait for a large one that does."""
    sizes, held, most = (30, 30, 20, 30, 20, 10), [], []
    monkeypatch.setattr(image_decoding, "MEMORY", 1000 * image_decoding.BYTES_PER_PIXEL)
    files = [encoded(picture(size=(size, size))) for size in sizes]
    together = threading.Barrier(len(files))

    def use(data: bytes) -> None:
        together.wait()
        with decoding(data) as image:
            held.append(image.size[0] ** 2)
            most.append(sum(held))
            time.sleep(0.02)
            held.remove(image.size[0] ** 2)

    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(use, files))
    assert len(most) == len(files)
    assert max(most) <= 1000


@pytest.mark.parametrize("size", [(40, 48), (61, 37), (64, 64), (20, 23), (33, 200)])
def test_the_view_is_resize_and_centre_crop(size):
    """As torchvision's Resize(32) and CenterCrop(24), written out with Pillow."""
    image = picture(size=size)
    height, width = size
    short = min(height, width)
    scaled = image.resize((int(32 * width / short), int(32 * height / short)),
                          Image.Resampling.BICUBIC)  # fmt: skip
    left, top = round((scaled.width - 24) / 2), round((scaled.height - 24) / 2)
    expected = np.asarray(scaled.crop((left, top, left + 24, top + 24))).transpose(2, 0, 1)
    seen = View.evaluation((24, 24), 32)(image)
    assert seen.shape == (3, 24, 24)
    assert np.abs(seen.astype(int) - expected.astype(int)).max() <= 1


def test_views_of_other_shapes_and_of_very_long_images():
    assert View.evaluation((24, 48), 32) == View((32, 64), (24, 48))
    assert View.stored((24, 48), 32) == View((32, 64), (32, 64))
    # 256 pixels across would be 2.5 million high.
    assert View.evaluation((224, 224), 256)(Image.new("RGB", (1, 10_000))).shape == (3, 224, 224)
    image = picture(size=(24, 48))
    stored = View.stored((24, 48), 24)(image)
    assert np.array_equal(stored, np.asarray(image).transpose(2, 0, 1))


def test_check_describes_images_and_names_the_bad(tmp_path, capsys):
    write_folder(tmp_path / "train", members() | bad_members())
    write_tar(tmp_path / "val.tar", members(2))
    commands.check(tmp_path)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "train: images in classes" in shown
    assert "images 12 classes 3: apple, pear, plum files a class 5 to 5" in shown
    assert "skipped 3: train/apple/cut.jpg" in shown
    assert "val.tar: images in classes" in shown
    assert "images 6" in shown
    nested = {f"train/{name}": data for name, data in members(2).items()}
    for path in (tmp_path / "val.tar", write_tar(tmp_path / "other" / "train-0.tar", nested)):
        commands.check(path)
        assert "3: apple, pear, plum" in capsys.readouterr().out
    commands.check(tmp_path / "train")
    assert "apple, pear, plum" in capsys.readouterr().out
    write_folder(tmp_path / "train", {"quince/1.png": b""})
    (tmp_path / "train" / "fig").mkdir()
    with pytest.raises(DataError, match="it lacks quince"):
        commands.check(tmp_path)
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "train/fig (holds no image)" in shown
    assert "classes without a good image quince" in shown


def test_images_without_classes_are_found_for_prediction(tmp_path):
    write_folder(tmp_path, {"b.png": b"x", "deep/er/a.JPG": b"y", "c.txt": b"z"})
    files = find_images(tmp_path)
    assert files.names == ("b.png", "deep/er/a.JPG")
    assert files.read(1) == b"y"
    with pytest.raises(DataError, match="there is no such folder or tar"):
        find_images(tmp_path / "nothing")
    with pytest.raises(DataError, match="holds no image"):
        find_images(write_folder(tmp_path / "texts", {"c.txt": b"z"}))


def test_who_names_the_split_is_shown_the_folder_above(tmp_path):
    write_folder(tmp_path / "train", members())
    write_tar(tmp_path / "other" / "train.tar", list(members().items()))
    for path in (tmp_path / "train", tmp_path / "other" / "train.tar"):
        with pytest.raises(DataError, match=f"is the folder above it meant, {path.parent}\\?"):
            find_split(path, "train")
    with pytest.raises(DataError) as error:
        find_split(tmp_path, "val")
    assert "above" not in str(error.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_named_pipe_among_the_images_is_not_waited_for(tmp_path):
    write_folder(tmp_path / "val", members())
    os.mkfifo(tmp_path / "val" / "apple" / "pipe.png")
    samples = ImageData(image_size=(8, 8), resize=8).load_test(tmp_path).samples
    assert [item.name for item in samples.skipped] == ["val/apple/pipe.png"]
    assert "not a regular file" in samples.skipped[0].reason


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A tar header of any size, negative ones included."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.GNU_FORMAT))
    block[156:157] = kind
    block[124:136] = size.to_bytes(12, "big", signed=True) if size < 0 else b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


PAX = b"14 size=-1024\n"
ENDLESS = {
    "a size below zero": header("a/x.png", 0) + header("a/y.png", -512),
    "at the start": header("a/x.png", -1024),
    "a sparse file": header("a/x.png", 0) + header("a/y.png", -512, tarfile.GNUTYPE_SPARSE),
    "a size in a record of its own": header("pax", len(PAX), tarfile.XHDTYPE)
    + PAX.ljust(512, b"\0") + header("a/y.png", 0),
    "a long name": header("a/x.png", 0) + header("a/y.png", -512, tarfile.GNUTYPE_LONGNAME),
}  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_tar_that_would_never_end_is_named(tmp_path, name):
    (tmp_path / "train.tar").write_bytes(ENDLESS[name].ljust(10_240, b"\0"))
    for path in (tmp_path / "train.tar", tmp_path):
        with pytest.raises(DataError, match=r"train\.tar: "):
            find_images(path) if path.is_file() else find_split(path, "train")
