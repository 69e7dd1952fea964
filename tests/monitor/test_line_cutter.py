"""Whatever a process prints comes out as lines that can be shown."""

import os

import pytest

from elephant.monitor.log_stream import LONGEST, LineCutter, is_noise, shown


def cut(data, size):
    cutter = LineCutter()
    return [line for i in range(0, len(data), size) for line in cutter.feed(data[i : i + size])] + cutter.rest()


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_lines_when_bytes_come_in_any_pieces_then_are_the_same(size):
    data = "one\nzwölf 🐘\r\n\nepoch 1\repoch 2\r\nrest".encode()
    assert cut(data, size) == ["one", "zwölf 🐘", "", "epoch 2", "rest"]


def test_lines_when_they_are_no_text_then_hold_nothing_that_moves_a_cursor():
    lines = cut(os.urandom(20_000) + b"\xff\xfe\n\x1b[2Jgone\x07\n", 999)
    assert lines[-1] == "gone\ufffd"
    assert all(letter.isprintable() for line in lines for letter in line)


@pytest.mark.parametrize("size", [4096, 10**7])
def test_line_when_it_is_megabytes_long_then_is_cut_and_the_next_is_whole(size):
    lines = cut(b"x" * 5_000_000 + b"\nnext\n", size)
    assert lines[1:] == ["next"]
    assert lines[0].startswith("x" * LONGEST) and len(lines[0]) < LONGEST + 20


def test_line_when_it_is_written_over_for_ever_then_does_not_grow():
    cutter = LineCutter()
    for step in range(10_000):
        assert cutter.feed(f"\rstep {step} of 10000".encode()) == []
    assert cutter.feed(b"\n") == ["step 9999 of 10000"]


def test_noise_when_tensorflow_prints_it_always_then_is_told_from_what_matters():
    always = [
        "I0000 00:00:1795328197.240328   12651 port.cc:153] oneDNN custom operations are on.",
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "E0000 00:00:1.2  1 cuda_dnn.cc:8310] Unable to register cuDNN factory",
        "2026-11-22 06:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary",
    ]
    matters = [
        "W0000 00:00:1.2  1 bfc_allocator.cc:501] Allocator (GPU_0_bfc) ran out of memory",
        "2026-11-22 06:00:00.123456: E tensorflow/core/x.cc:1] failed",
        "WARNING: the loss is NaN",
    ]
    assert [is_noise(line) for line in always + matters] == [True] * len(always) + [False] * len(matters)


def test_shown_when_colours_are_used_then_leaves_the_text():
    assert shown("\x1b[1;31merror\x1b[0m \x1b]0;title\x07done") == "error done"
