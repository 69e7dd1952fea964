import pytest
from tables import every_case

from elephant.compression import (
    Encoded,
    PowerSGD,
    TopK,
    Uncompressed,
    check_compression,
    compression_of,
    reduction_for,
)
from elephant.compression.codec import known_names
from elephant.errors import ConfigurationError

SLICES = [(0, (100, 100))]


@every_case(
    ("name", "kind"),
    [
        (None, Uncompressed),
        ("bfloat16", Encoded),
        ("float16", Encoded),
        ("int8", Encoded),
        ("int8:feedback", Encoded),
        ("topk", TopK),
        ("topk:0.5", TopK),
        ("powersgd", PowerSGD),
        ("powersgd:1", PowerSGD),
    ],
)
def test_names_when_known_then_make_their_reduction(name, kind):
    check_compression(name)
    assert type(reduction_for(name, SLICES)) is kind


@every_case(
    "name",
    [
        "",
        "gzip",
        "Int8",
        "int8:4",
        "int8:",
        "bfloat16:feedback",
        "bfloat16:",
        "topk:",
        "topk:0",
        "topk:1.5",
        "topk:nan",
        "topk:x",
        "topk:1:2",
    ]
    + ["powersgd:0", "powersgd:1.5", "powersgd:-1", ":", 8],
)
def test_names_when_unknown_then_the_error_lists_the_known_ones(name):
    with pytest.raises(ConfigurationError) as raised:
        check_compression(name)
    assert "None or one of bfloat16, float16, int8, powersgd, topk." in str(raised.value)
    assert f"Received: {name!r}." in str(raised.value)


def test_descriptions_when_looked_up_then_say_what_is_saved():
    found = [compression_of(name) for name in known_names()]
    assert [each.name for each in found] == list(known_names())
    assert [each.is_codec for each in found] == [True, True, True, False, False]
    assert [each.ratio and round(each.ratio, 2) for each in found] == [2.0, 2.0, 3.98, None, 66.67]
