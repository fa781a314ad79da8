"""Cluster files: presets, what is written is read back, and what is wrong in them is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from interlace.planner.cluster import mapping_of, preset_names, read_cluster, write_cluster
from interlace.planner.hardware import FusedPoint, GemmPoint


def _changed(path: str, value: Any) -> dict[str, Any]:
    """The preset h100x8 as a mapping with one field (dotted path) set, or removed where value is None."""
    content = mapping_of(read_cluster("h100x8"))
    place: Any = content
    *way, last = path.split(".")
    for name in way:
        place = place[name]
    if value is None:
        del place[last]
    else:
        place[last] = value
    return content


def test_presets_hold_sane_figures() -> None:
    """Units slip easily: an H100's peak is 989 TFLOP/s, its NVLink 450 GB/s, its memory about 80 GiB."""
    assert {"a100x8", "h100x8", "h200x8", "b200x8", "l20x8", "h100-pcie", "cpu"} <= set(preset_names())
    h100 = read_cluster("h100x8")
    assert h100.device.peak["bf16"] == pytest.approx(989.4e12)
    assert h100.node.bandwidth == pytest.approx(450e9) and h100.node.multicast
    assert h100.fabric is not None and h100.fabric.bandwidth == pytest.approx(50e9)
    for name in preset_names():
        cluster = read_cluster(name)
        assert 1e9 < cluster.device.memory < 300 * 2**30 and cluster.node.latency < 1e-3
        assert cluster.device.memory_bandwidth < min(cluster.device.peak.values())


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Measured tables included."""
    gemms, fused = (
        (GemmPoint(64, 128, 256, 0.5, "fp32"),),
        (FusedPoint("gemm_all_reduce", 64, 128, 256, 2, 1e-3),),
    )
    cluster = read_cluster("cpu").with_device(gemms=gemms, fused=fused)
    write_cluster(cluster, tmp_path / "own.yaml")
    assert read_cluster(tmp_path / "own.yaml") == cluster


def test_links_follow_the_placement() -> None:
    """8 neighbours share NVLink; 8 ranks a node apart need the fabric, thinner when it is oversubscribed."""
    cluster = read_cluster(_changed("oversubscription", 2.0))
    assert cluster.link(8).name == "NVLink4"
    assert cluster.link(4, 2).name == "NVLink4"
    assert cluster.link(2, 8).bandwidth == pytest.approx(25e9)
    assert cluster.link(1, 64).name == "NVLink4"
    with pytest.raises(ValueError, match="no fabric"):
        read_cluster("cpu").link(4)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("device", None, "device is missing"),
        ("device.memory_gib", -1, "memory_gib=-1"),
        ("device.memory_gib", "much", "memory_gib='much'"),
        ("device.peak_tflops", {}, "peak_tflops is empty"),
        ("device.peak_tflops", {"bf17": 1}, "bf17 is not a field"),
        ("device.efficiency", 1.5, "efficiency=1.5"),
        ("device.reserved_gib", 99, "leaves nothing"),
        ("node.gb_per_s", 0, "gb_per_s=0"),
        ("node.gb_per_s", float("inf"), "gb_per_s=inf"),
        ("node.speed", 3, "speed is not a field"),
        ("fabric.multicast", True, "multicast"),
        ("devices_per_node", 0, "devices_per_node=0"),
        ("devices_per_node", 8.5, "devices_per_node=8.5"),
        ("numa", 3, "numa=3 does not divide"),
        ("oversubscription", 0.5, "oversubscription=0.5"),
        ("device.gemms", [{"m": 1, "n": 1, "k": 1}], "efficiency is missing"),
    ],
)
def test_a_wrong_field_is_named(path: str, value: Any, words: str) -> None:
    """One line with the field, the value and what is expected."""
    with pytest.raises(ValueError, match=words) as caught:
        read_cluster(_changed(path, value))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_cluster(tmp_path: Path) -> None:
    """A missing file, broken YAML, a list, and a name nobody knows."""
    broken = tmp_path / "broken.yaml"
    for text, words in (("a: [", "not YAML"), ("- 1", "mapping"), ("", "mapping")):
        broken.write_text(text)
        with pytest.raises(ValueError, match=words):
            read_cluster(broken)
    with pytest.raises(ValueError, match=r"none\.yaml"):
        read_cluster(tmp_path / "none.yaml")
    with pytest.raises(ValueError, match="h100x8"):
        read_cluster("h101")
