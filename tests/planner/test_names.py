"""A name of a machine is read, or refused in one sentence with the nearest that exists; nothing heavy is imported."""

import re

import pytest

from jaxfb.planner.topology import parse_topology


@pytest.mark.parametrize(
    "text, devices, torus",
    [("v5p:4x4x8", 128, 3), ("v5e:4x4", 16, 2), ("tpu7x:2x2x1", 8, 3), ("trillium:2x4", 8, 2)],
)
def test_a_tpu_is_a_torus_of_chips(text, devices, torus):
    topology = parse_topology(text)
    assert (topology.platform, topology.num_devices, len(topology.shape)) == ("tpu", devices, torus)


@pytest.mark.parametrize(
    "text",
    "v5p:2x2x1 v5p:2x2x2 v5p:2x2x4 v5p:2x4x4 v5p:4x4x4 v5p:4x4x8 v5p:8x8x8 v5p:8x8x16 v5p:16x16x12 v5p:16x16x24 "
    "v4:4x4x12 tpu7x:2x2x1 v5e:1x1 v5e:2x2 v5e:2x4 v5e:8x16 v5e:16x16 v6e:4x2 v6e:4x8 v6e:8x8".split(),
)
def test_slices_that_cloud_tpu_makes_can_be_planned(text):
    assert parse_topology(text).text == text


def test_other_machines():
    assert parse_topology("cpu:8").num_devices == 8
    gpus = parse_topology("gpu:h100x64")
    assert (gpus.num_devices, gpus.chip.name, gpus.platform) == (64, "h100", "gpu")


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("v9:4x4", "unknown topology 'v9:4x4'.*did you mean v4:4x4"),
        ("v5p:4x4", "the 3 dimensions of a slice of v5p; write v5p:2x2x4"),
        ("v5p:4x4x4x2", "the 3 dimensions of a slice of v5p; write v5p:4x4x8"),
        ("v5e:16x16x1", "the 2 dimensions of a slice of v5e; write v5e:16x16"),
        ("v5e:16x16x2", "the 2 dimensions of a slice of v5e; write v5e:4x4"),
        ("v5e:3x4", "no slice 3x4, it has 1x1, 2x2, .*16x16; the nearest is v5e:4x4"),
        ("v6e:4x6", "no slice 4x6.*nearest is v6e:4x8"),
        ("v6e:16x32", "no slice 16x32.*nearest is v6e:16x16"),
        ("v5p:4x4x5", "no slice 4x4x5, it has .* and those of multiples of 4; the nearest is v5p:4x4x4"),
        ("v5p:2x2x8", "no slice 2x2x8.*nearest is v5p:2x2x4"),
        ("v4:3x4x8", "no slice 3x4x8.*nearest is v4:4x4x8"),
        ("tpu7x:6x8x8", "no slice 6x8x8.*nearest is tpu7x:8x8x8"),
        ("v5e:4xfour", "the 2 dimensions of a slice of v5e"),
        ("v5p", "write one such as v5p:4x4x8"),
        ("v5p-8", r"did you mean v5p:2x2x1 \(4 chips\)\?"),
        ("v5litepod-16", r"did you mean v5e:4x4 \(16 chips\)\?"),
        ("v4-512", r"did you mean v4:4x8x8 \(256 chips\)\?"),
        ("v5p-6", "write one such as v5p:4x4x8"),
        ("h100", r"did you mean gpu:h100x8\?"),
        ("h100x16", r"did you mean gpu:h100x16\?"),
        ("gpu:foo", "gpu:NAMExCOUNT.*h100"),
        ("gpu:h100x12", "hosts of 8.*nearest is gpu:h100x16"),
        ("cpu:0", "write cpu:8"),
        ("v99:4", "did you mean v4:4x4x4"),
        ("v5e:99999x99999", "too many devices.*write v5e:4x4"),
        ("gpu:h100x99999999999", "too many devices.*write gpu:h100x8"),
        ("gpu:h100x0", "not a number of devices; write gpu:h100x8"),
        ("cpux:9999999999", "did you mean cpu:8"),
        pytest.param(f"cpu:{'9' * 5000}", "too many devices.*write cpu:8", id="digits"),
    ],
)
def test_names_that_do_not_exist_are_refused_with_the_nearest(text, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        parse_topology(text)
    advised = re.split("did you mean |nearest is |write (?:one such as )?", str(refusal.value))[-1]
    for each in re.findall(r"\w+:\w+", advised):
        assert each == "gpu:NAMExCOUNT" or parse_topology(each)
