"""GPU architectures: what the user asks for, what is present, what nvcc can do."""

import pytest

from build_support.archs import DEFAULT_ARCHS, Arch, choose_archs, gencode_flags, parse_archs
from build_support.toolchain import BuildError

SUPPORTED = {75, 80, 86, 89, 90, 100, 120}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.0", [Arch(8, 0)]),
        ("9.0a+PTX;8.0", [Arch(8, 0), Arch(9, 0, ptx=True)]),
        ("8.0, 9.0 12.0", [Arch(8, 0), Arch(9, 0), Arch(12, 0)]),
    ],
)
def test_parse(text, expected):
    assert parse_archs(text) == expected


@pytest.mark.parametrize("text", ["80", "sm_80", "8.0a", "8.0;;x", "8.0+ptx", "auto"])
def test_what_cannot_be_read_is_named(text):
    with pytest.raises(BuildError, match=r"FLASH_ATTN_EXT_ARCHS=.*cannot read(?s:.*)8\.0;9\.0a\+PTX"):
        parse_archs(text)


def test_too_old():
    with pytest.raises(BuildError, match=r"7\.5 is too old"):
        parse_archs("7.5;8.0")


def test_the_text_form_reads_back():
    assert ";".join(map(str, parse_archs(DEFAULT_ARCHS))) == DEFAULT_ARCHS


def test_no_gpu_means_the_default_list():
    assert choose_archs(None, [], SUPPORTED) == parse_archs(DEFAULT_ARCHS)
    assert choose_archs("", [(7, 5)], SUPPORTED) == parse_archs(DEFAULT_ARCHS)


def test_gpus_present_are_what_is_compiled_for():
    assert choose_archs(None, [(9, 0), (9, 0), (8, 6), (7, 5)], SUPPORTED) == [Arch(8, 6), Arch(9, 0)]


def test_a_gpu_newer_than_nvcc_gets_ptx():
    assert choose_archs(None, [(9, 0), (13, 0)], SUPPORTED) == [Arch(9, 0), Arch(12, 0, ptx=True)]
    assert choose_archs(None, [(12, 0), (13, 0)], SUPPORTED) == [Arch(12, 0, ptx=True)]


def test_the_wish_wins_and_is_checked_against_nvcc():
    assert choose_archs("8.6", [(9, 0)], SUPPORTED) == [Arch(8, 6)]
    with pytest.raises(BuildError, match=r"cannot compile for 12\.1; it knows 8\.0, 8\.6"):
        choose_archs("8.0;12.1", [], SUPPORTED)


def test_one_ptx_serves_every_architecture():
    assert gencode_flags(parse_archs(DEFAULT_ARCHS)) == ["-gencode=arch=compute_80,code=[sm_80,sm_90,compute_80]"]
    assert gencode_flags([Arch(8, 6), Arch(9, 0)]) == ["-gencode=arch=compute_80,code=[sm_86,sm_90]"]
    assert gencode_flags([]) == []


def test_launches_that_overlap_have_a_ptx_of_their_own():
    flags = ["-gencode=arch=compute_80,code=[sm_80]", "-gencode=arch=compute_90,code=[sm_90,compute_90]"]
    assert gencode_flags(parse_archs(DEFAULT_ARCHS), own_from=90) == flags
    assert gencode_flags([Arch(8, 6, ptx=True)], own_from=90) == ["-gencode=arch=compute_80,code=[sm_86,compute_80]"]
    assert gencode_flags([Arch(12, 0)], own_from=90) == ["-gencode=arch=compute_90,code=[sm_120]"]


def test_hopper_kernels_are_compiled_for_hopper_alone():
    assert gencode_flags(parse_archs(DEFAULT_ARCHS), only=90) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert gencode_flags([Arch(8, 0)], only=90) == []
