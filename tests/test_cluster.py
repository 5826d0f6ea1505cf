"""Cluster files: their contents, every error with its line, and the roofline."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from hap.cluster.catalogue import catalogue, find, nearest
from hap.cluster.cluster_file import load_cluster
from hap.cluster.cluster_text import cluster_yaml
from hap.cluster.device import USABLE_MEMORY, Device
from hap.cluster.figures import BY_KEY, FIGURES, Figure, documentation
from hap.cluster.link import Link
from hap.cluster.topology import Cluster
from hap.cluster.work import ELEMENTWISE, Work
from hap.errors import ClusterError

CLUSTERS = Path(__file__).parents[1] / "benchmarks" / "clusters"

TWO_NODES = """\
name: two
links:
  between: {bandwidth: 10 Gbit/s, latency: 30 us}
nodes:
  - name: fast
    gpus: 2
    type: V100
  - name: slow
    gpus: 1
    type: P100
"""


EFFICIENCY = {"attention": 0.5, "conv": 0.8, **dict.fromkeys(ELEMENTWISE, 0.1)}
"""All that a file of an unknown type leaves to the catalogue."""


def device(**changes: object) -> Device:
    figures: dict[str, object] = {
        "name": "a:0",
        "kind": "toy",
        "node": "a",
        "memory_bytes": 2**30,
        "flops_per_s": {"float32": 1e12, "float16": 4e12},
        "memory_bytes_per_s": 1e11,
        "launch_s": 1e-5,
        "efficiency": EFFICIENCY,
    }
    return Device(**{**figures, **changes})  # type: ignore[arg-type]


# --- the roofline ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work("matmul", "float32", 1e12, 0), 1.0),
        (Work("matmul", "float16", 1e12, 0), 0.25),
        (Work("attention", "float16", 1e12, 0), 0.5),
        (Work("matmul", "float32", 1e12, 2e11), 2.0),
        (Work("memory", "int64", 0, 1e11), 1.0),
        (Work("matmul", "bfloat16", 1e12, 0), 1.0),  # no bfloat16 units: emulated in float32
        (Work("matmul", "complex128", 1e12, 0), 2.0),  # float64 without a figure: half of float32
    ],
)
def test_time_is_launch_plus_the_longer_of_arithmetic_and_traffic(work, seconds) -> None:
    assert device().seconds(work) == pytest.approx(1e-5 + seconds)


def test_no_work_takes_no_time() -> None:
    assert device().seconds(Work("matmul", "float32", 0, 0)) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 0},
        {"memory_bytes_per_s": -1.0},
        {"flops_per_s": {"float32": float("nan")}},
        {"flops_per_s": {"float16": 1e12}},
        {"launch_s": -1e-6},
        {"efficiency": {"conv": 0.0}},
    ],
)
def test_a_device_refuses_impossible_figures(changes) -> None:
    with pytest.raises(ClusterError, match=r"a:0"):
        device(**changes)


# --- the table of figures: one test over all its rows ---------------------------------------

OTHERS = {
    "memory": 2**31, "memory_bandwidth": 2e11, "launch": 2e-5, "host": 3e-5, "operands": 3e10, "delay": 0.01,
    "interference": 0.25, "drag": 1.5, "relaunch": 0.25, "flops": {"float32": 2e12, "float16": 4e12},
    "efficiency": {**EFFICIENCY, "attention": 0.25}, "price_per_hour": 2.5,
}  # fmt: skip
"""Figure -> a value that differs from that of :func:`device`."""


def changed(figure: Figure) -> Device:
    return device().changed({figure.path: OTHERS[figure.key]})


def two(other: Device) -> Cluster:
    pair = (device(), replace(other, name="a:1"))
    return Cluster("two", pair, {"a": Link(1e9, 0.0)}, Link(1e9, 0.0))


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_devices_that_differ_in_one_figure_are_unlike(figure: Figure) -> None:
    assert two(device()).types() == ((0, 1),)
    assert two(changed(figure)).types() == ((0,), (1,))
    assert two(changed(figure)).digest != two(device()).digest


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_a_figure_survives_both_files(figure: Figure) -> None:
    made = two(changed(figure))
    stored = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert Cluster.from_dict(stored) == made
    read = load_cluster(cluster_yaml(made)).devices[1]
    assert figure.of(read) == figure.of(made.devices[1])


@pytest.mark.parametrize("kind", ["A100-40", "of the lab", "cpu"])
@pytest.mark.parametrize("host_s", [0.0, 1.5e-5, 2e-5])
def test_the_time_of_the_host_survives_whatever_the_catalogue_has(kind: str, host_s: float) -> None:
    made = two(device(kind=kind, host_s=host_s))
    read = load_cluster(cluster_yaml(made))
    assert [d.host_s for d in read.devices] == [d.host_s for d in made.devices]


def test_gpus_wait_for_their_hosts_unless_the_file_says_otherwise() -> None:
    new = "memory: 8 GiB, flops: 9 TFLOP/s, memory_bandwidth: 400 GB/s"
    read = load_cluster(
        "links: {between: 1 GB/s}\nnodes:\n"
        "- {name: a, gpus: 1, type: A100-40}\n- {name: b, gpus: 1, type: A100-40, host: 0 us}\n"
        f"- {{name: c, gpus: 1, type: new, {new}, inside: 1 GB/s}}\n- {{name: d, gpus: 1, type: cpu}}\n"
    )
    assert [d.host_s for d in read.devices] == [pytest.approx(15e-6), 0, pytest.approx(15e-6), 0]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_a_figure_with_its_default_is_not_stored(figure: Figure) -> None:
    stored = device(efficiency={}).to_dict()
    assert (figure.name in stored) == (figure.default is None)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.key)
def test_a_figure_out_of_its_range_is_refused(figure: Figure) -> None:
    nothing = figure.least if "(" in figure.open else figure.least - 1e-3
    too_much = figure.most if ")" in figure.open else figure.most + 1e-3
    infinite = figure.most == float("inf") and ")" not in figure.open
    for value in (nothing, float("nan"), *([] if infinite else [too_much])):
        entry = figure.by[0] if figure.by else ""
        whole = {**figure.of(device()), entry: value} if figure.by else value
        with pytest.raises(ClusterError, match=r"of device a:0") as error:
            device().changed({figure.path: whole})
        assert figure.name in error.value.what
        assert error.value.hint == figure.hint


def test_a_machine_is_as_fast_and_as_large_as_its_devices_together() -> None:
    fast = device().changed({figure.path: OTHERS[figure.key] for figure in FIGURES})
    both = Device.together([device(), fast], "a")
    seen = {figure.key: figure.of(both) for figure in FIGURES}
    assert seen == OTHERS | {
        "memory": 3 * 2**30, "memory_bandwidth": 3e11, "operands": float("inf"),
        "flops": {"float32": 3e12, "float16": 8e12}, "relaunch": 1.0,
        "efficiency": EFFICIENCY,
    }  # fmt: skip


def test_retired_figures_of_old_files_are_ignored_with_a_warning() -> None:
    made = two(changed(BY_KEY["drag"]))
    lines = cluster_yaml(made).replace(
        "drag: 1.5", "drag: 1.5\n        start: 0.3\n        traffic: {all_gather: 0.5}"
    )
    with pytest.warns(UserWarning, match="text>: 'start', 'traffic': ignored.*hap profile"):
        assert load_cluster(lines).digest == made.digest
    stored = made.to_dict()
    stored["devices"][1]["start"] = 0.3
    with pytest.warns(UserWarning, match="a:1: 'start': ignored"):
        assert Cluster.from_dict(stored) == made
    stored["devices"][1] |= {"start": 1.0, "traffic": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Cluster.from_dict(stored) == made
    with pytest.raises(ClusterError) as error:
        load_cluster(lines.replace("drag:", "drg:"))
    assert "start" not in (error.value.hint or "")


def test_the_docs_list_every_figure() -> None:
    text = (Path(__file__).parents[1] / "docs" / "cluster-file.md").read_text()
    assert "\n".join(documentation()) in text, "\n".join(documentation())


@pytest.mark.parametrize("figures", [(0, 1e-6), (-1, 0), (float("inf"), 0), (1e9, -1)])
def test_a_link_refuses_impossible_figures(figures) -> None:
    with pytest.raises(ClusterError, match="link"):
        Link(*figures)


# --- the catalogue -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "names",
    [
        ("V100", "v100-16", "V100x16", "V100_16GB", "Tesla V100-SXM2-16GB"),
        ("V100-32", "v100x32"),
        ("A100", "A100-40", "a100x40", "A100-40GB", "NVIDIA A100-SXM4-40GB"),
        ("A100-80", "A100 80GB"),
        ("RTX3090", "RTX 3090", "3090", "NVIDIA GeForce RTX 3090"),
        ("A6000", "RTX A6000", "NVIDIA RTX A6000"),
    ],
)
def test_spellings_of_one_gpu(names) -> None:
    kinds = {entry.device.kind for entry in map(find, names) if entry}
    assert len(kinds) == 1
    assert all(find(name) for name in names)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80"),
        ("A100-SXM", "A100-40"),
        ("A100-PCIE", "A100-PCIE-40"),
        ("A100-80G", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100 SXM5 80GB", "H100"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144"),
        ("NVIDIA A2", "A2"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A40", "A40"),
        ("Tesla V100-PCIE-32GB", "V100-PCIE-32"),
        ("Tesla P100-PCIE-12GB", "P100-12"),
        ("NVIDIA GeForce RTX 2080", "RTX2080"),
        ("2080ti", "RTX2080Ti"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX3080Ti"),
        ("RTX 4090 24GB", "RTX4090"),
        ("NVIDIA GeForce RTX 5090", "RTX5090"),
        ("A6000 48GB", "A6000"),
        ("Quadro RTX 6000", "RTX6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("AMD Instinct MI250X / MI250", "MI250X"),
        ("AMD Instinct MI300X VF", "MI300X"),
    ],
)
def test_names_as_drivers_and_people_write_them(name: str, kind: str) -> None:
    found = find(name)
    assert found is not None
    assert found.device.kind == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("A100-SXM-64GB", "A100-80"),
        ("A100-PCIE-64GB", "A100-PCIE-80"),
        ("NVIDIA H100 64GB HBM2", "H100"),
        ("RTX 4090 48GB", "RTX4090"),
        ("H20 PCIe", None),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA GB10", None),
        ("Tesla K80", None),
        ("A101-40", None),
        ("NVIDIA", None),
    ],
)
def test_only_variants_of_the_same_model_are_near(name: str, kind: str | None) -> None:
    assert find(name) is None
    assert nearest(name) == kind


def test_the_docs_list_every_kind() -> None:
    text = (Path(__file__).parents[1] / "docs" / "cluster-file.md").read_text()
    assert not [kind for kind in catalogue() if not re.search(rf"\b{kind}\b(?!-)", text)]


def test_the_catalogue_leaves_room_on_the_card() -> None:
    node = "nodes: [{{gpus: 1, type: V100-32{}}}]\n"
    typical = load_cluster(node.format("")).devices[0]
    assert typical.memory_bytes == round(31.7 * 2**30 * USABLE_MEMORY)
    assert "94%" in typical.source["memory_bytes"]
    assert load_cluster(node.format(", memory: 31 GiB")).devices[0].memory_bytes == 31 * 2**30
    assert catalogue()["cpu"].device.memory_bytes == 2 * 2**30


def test_bridges_join_pairs_alone() -> None:
    def rate(count: int, kind: str) -> float:
        yaml = load_cluster(f"nodes: [{{gpus: {count}, type: {kind}}}]\n")
        hosts = load_cluster(f"a slots={count} type={kind}\n\n")
        assert yaml.intra["node"] == hosts.intra["a"]
        return yaml.intra["node"].bandwidth_bytes_per_s

    assert rate(2, "H100-NVL") == 230e9
    assert rate(4, "H100-NVL") == 40e9
    assert rate(2, "A100-PCIE-40") == 20e9


@pytest.mark.parametrize(
    ("kind", "figure", "value"),
    [
        ("MI250X", "float32", 47.9e12),
        ("MI300X", "float64", 163.4e12),
        ("RTX2080", "float32", 10.1e12),
        ("A100-PCIE-40", "memory_bandwidth", 1555e9),
        ("A100-PCIE-80", "memory_bandwidth", 1935e9),
    ],
)
def test_peaks_are_those_of_the_vendor(kind: str, figure: str, value: float) -> None:
    assert catalogue()[kind].peak[figure] == value


def test_the_catalogue_is_complete_and_plausible() -> None:
    wanted = "P100 V100-16 V100-32 T4 A10G L4 L40S P40 A100-40 A100-80 RTX3090 RTX4090 A6000 H100"
    assert {*wanted.split(), "H200", "MI250X", "MI300X", "cpu"} <= set(catalogue())
    for kind, entry in catalogue().items():
        known = entry.device
        assert {f"flops_per_s.{dtype}" for dtype in known.flops_per_s} < set(known.source), kind
        for dtype, rate in known.flops_per_s.items():
            assert rate <= entry.peak.get(dtype, rate), f"{kind} beats its {dtype} datasheet"
        assert known.memory_bytes_per_s <= entry.peak.get("memory_bandwidth", float("inf")), kind


def test_provenance_tells_fitted_figures_from_derived_ones() -> None:
    assert (
        "fitted to measured layers" in catalogue()["V100-16"].device.source["flops_per_s.float32"]
    )
    assert "as GH200 reaches" in catalogue()["H200"].device.source["flops_per_s.float16"]
    assert "as H100-NVL reaches" in catalogue()["H200"].device.source["flops_per_s.float32"]
    mi300x = catalogue()["MI300X"].device
    assert "typical of the fitted" in mi300x.source["flops_per_s.float32"]
    assert "published" in mi300x.source["flops_per_s.float16"]
    assert 600e12 <= mi300x.flops_per_s["float16"] <= 655e12
    assert "rough" in catalogue()["cpu"].device.source["flops_per_s.float32"]


# --- files -------------------------------------------------------------------------------


EXAMPLES = {  # file: (ranks of each type, nodes)
    "hap_testbed.yaml": ([16, 48], 8),
    "lab_mixed.yaml": ([4, 8], 2),
    "unlike8.yaml": ([4, 4], 2),
    "even8.yaml": ([8], 1),
    "h100.yaml": ([1], 1),
    "h200.yaml": ([1], 1),
    "demo4.yaml": ([2, 2], 4),
    "prediction4.yaml": ([2, 2], 4),
    "three_types64.yaml": ([16, 24, 24], 8),
    "three_types8.yaml": ([2, 3, 3], 3),
    "three_types1024.yaml": ([256, 384, 384], 128),
    "irregular29.yaml": ([21, 8], 8),
    "hostfile.txt": ([4, 4], 2),
    "race_4411.yaml": ([2, 2], 4),
    "race_even.yaml": ([4], 4),
    "race_little_memory.yaml": ([1, 3], 4),
    "race_paper.yaml": ([2, 2], 4),
    "race_straggler.yaml": ([3, 1], 4),
    "race_two_sites.yaml": ([2, 2], 2),
    "race_three_kinds.yaml": ([1, 1, 2], 4),
    "slow_links4.yaml": ([2, 2], 4),
}


@pytest.mark.parametrize("file", sorted(path.name for path in CLUSTERS.iterdir()))
def test_example_clusters(file: str) -> None:
    ranks_of_each_type, nodes = EXAMPLES[file]
    cluster = load_cluster(CLUSTERS / file)
    assert [len(ranks) for ranks in cluster.types()] == ranks_of_each_type
    assert len(cluster.nodes) == nodes
    assert cluster.world_size == sum(ranks_of_each_type)
    again = Cluster.from_dict(json.loads(json.dumps(cluster.to_dict())))
    assert again == cluster
    assert again.digest == cluster.digest
    assert hash(again) == hash(cluster)


def test_unequal_machines_keep_their_order() -> None:
    cluster = load_cluster(CLUSTERS / "irregular29.yaml")
    assert [len(cluster.ranks(node)) for node in cluster.nodes] == [7, 1, 3, 8, 1, 6, 1, 2]
    assert {cluster.devices[rank].kind for rank in cluster.ranks("v100")} == {"V100-16"}


def test_ranks_follow_the_file() -> None:
    cluster = load_cluster(TWO_NODES)
    assert [d.name for d in cluster.devices] == ["fast:0", "fast:1", "slow:0"]
    assert cluster.nodes == ("fast", "slow")
    assert cluster.ranks("fast") == (0, 1)
    assert cluster.inter == Link(1.25e9, 30e-6, "<text>:3")
    assert str(cluster) == "two: 2 V100-16 + 1 P100 on 2 nodes, 1.25 GB/s between"


def test_the_paths_and_the_text_of_a_hostfile_agree() -> None:
    path = CLUSTERS / "hostfile.txt"
    assert load_cluster(path).digest == load_cluster(path.read_text()).digest
    unlike8 = load_cluster(CLUSTERS / "unlike8.yaml")
    assert [d.figures for d in load_cluster(path).devices] == [d.figures for d in unlike8.devices]


def test_typical_elementwise_work_follows_the_stated_memory() -> None:
    """Norms take as long per byte of the memory's rate, whatever the rate of products."""
    nodes = "nodes: [{{name: a, gpus: 1, type: V100{}}}]\n"
    norm = Work("norm", "float32", 1e9, 0.0)

    def seconds(figures: str) -> float:
        device = load_cluster(nodes.format(figures)).devices[0]
        return device.seconds(norm) - device.launch_s

    usual = seconds("")
    assert seconds(", flops: 3 TFLOP/s") == pytest.approx(usual)
    rate = catalogue()["V100-16"].device.memory_bytes_per_s
    assert seconds(f", memory_bandwidth: {rate / 2} B/s") == pytest.approx(2 * usual)
    stated = ", flops: 10 TFLOP/s, efficiency: {norm: 0.01}"
    assert seconds(stated) == pytest.approx(1e9 / 10e12 / 0.01)


def test_an_unknown_gpu_does_elementwise_work_as_one_of_the_catalogue() -> None:
    known = catalogue()["A100-40"].device
    flops = ", ".join(f"{dtype}: {rate} FLOP/s" for dtype, rate in known.flops_per_s.items())
    text = f"{{type: X, memory: 9 GiB, flops: {{{flops}}}, memory_bandwidth: {known.memory_bytes_per_s} B/s}}"
    (mine,) = load_cluster(f"nodes:\n  - {{name: a, gpus: [{text}]}}\n").devices
    assert mine.efficiency == pytest.approx(known.efficiency, rel=1e-3)
    update = Work("update", "float32", 110e6 * 12, 110e6 * 28)
    assert mine.seconds(update) == pytest.approx(known.seconds(update), rel=1e-3)


@pytest.mark.parametrize(
    ("gpus", "kinds"),
    [
        ("{A100-40: 1, V100-16: 2}", ["A100-40", "V100-16", "V100-16"]),
        ("{type: V100-16, count: 2}", ["V100-16", "V100-16"]),
    ],
)
def test_a_node_may_count_its_gpus_by_type(gpus: str, kinds: list[str]) -> None:
    cluster = load_cluster(f"nodes:\n  - {{name: box, gpus: {gpus}}}\n")
    assert [d.kind for d in cluster.devices] == kinds


@pytest.mark.parametrize("gpus", ["{}", "{A100-40: 0}", "{A100-40: many}", "{4: 1}"])
def test_a_mapping_of_gpus_without_counts_is_refused(gpus: str) -> None:
    with pytest.raises(ClusterError):
        load_cluster(f"nodes:\n  - {{name: box, gpus: {gpus}}}\n")


def test_a_node_may_mix_gpus_and_override_figures() -> None:
    cluster = load_cluster("""\
nodes:
  - name: box
    memory: 10 GiB
    gpus:
      - A100-40
      - type: V100
        count: 2
        memory: 12 GiB
        flops: {float32: 10 TFLOP/s}
        memory_bandwidth: 500 GB/s
        launch: 0 us
        efficiency: {conv: 0.7}
        source: measured in May
      - {type: K80, memory: 12 GiB, flops: 3 TFLOP/s, memory_bandwidth: 150 GB/s}
    inside: 8 GB/s
""")
    a100, v100, _, k80 = cluster.devices
    assert [d.memory_bytes >> 30 for d in cluster.devices] == [10, 12, 12, 12]
    assert v100.flops_per_s["float32"] == 10e12
    assert v100.flops_per_s["float16"] == catalogue()["V100-16"].device.flops_per_s["float16"]
    assert v100.memory_bytes_per_s == 500e9
    assert v100.launch_s == 0
    assert v100.efficiency["attention"] == 0.5
    assert v100.efficiency["conv"] == 0.7
    assert v100.efficiency.keys() >= set(ELEMENTWISE)
    assert a100.source["memory_bytes"] == "<text>:3"
    assert v100.source["memory_bytes"] == "measured in May (<text>:8)"
    assert v100.source["flops_per_s.float16"].startswith("catalogue")
    assert k80.kind == "K80"
    assert k80.flops_per_s == {"float32": 3e12}
    assert cluster.intra["box"] == Link(8e9, 10e-6, "<text>:15; latency assumed")


def test_one_rate_moves_all_the_dtypes() -> None:
    cluster = load_cluster("nodes:\n  - {gpus: 1, type: cpu, flops: 10 GFLOP/s}\n")
    assert cluster.devices[0].flops_per_s == {"float32": 10e9, "float64": 5e9}


def test_a_mixed_machine_is_as_fast_inside_as_its_slower_kind() -> None:
    cluster = load_cluster("nodes:\n  - {gpus: [A100-40, P100]}\n")
    assert cluster.intra["node"].bandwidth_bytes_per_s == 10e9
    assert cluster.inter.source.startswith("not used")


def test_local_shares_this_machine() -> None:
    one, four = load_cluster("local:1"), load_cluster("local:4")
    assert four.world_size == 4
    assert len(four.types()) == 1
    whole, quarter = one.devices[0], four.devices[0]
    assert quarter.flops_per_s["float32"] == pytest.approx(whole.flops_per_s["float32"] / 4)
    assert quarter.memory_bytes == whole.memory_bytes // 4
    assert load_cluster("local").world_size >= 1


def test_loss_of_a_device() -> None:
    cluster = load_cluster(TWO_NODES)
    assert [d.name for d in cluster.without(0).devices] == ["fast:1", "slow:0"]
    alone = cluster.without(2)
    assert alone.nodes == ("fast",)
    assert set(alone.intra) == {"fast"}
    with pytest.raises(ClusterError, match="no rank 3"):
        cluster.without(3)


def test_digest_follows_the_figures_alone() -> None:
    base = load_cluster(TWO_NODES)
    assert load_cluster("# a comment\n" + TWO_NODES.replace("two", "2")).digest == base.digest
    for old, new in (("10 Gbit", "11 Gbit"), ("gpus: 1", "gpus: 2"), ("type: P100", "type: T4")):
        assert load_cluster(TWO_NODES.replace(old, new)).digest != base.digest


def test_damaged_plan_data_is_an_error_for_people() -> None:
    data = load_cluster(TWO_NODES).to_dict()
    del data["inter"]["latency_s"]
    with pytest.raises(ClusterError, match="damaged"):
        Cluster.from_dict(data)


NODE = "nodes:\n  - gpus: 2\n    type: V100\n"
BAD = {
    "unknown key": (NODE + "    memroy: 3 GiB\n", 4, "memroy", "memory"),
    "unknown key at the top": ("nods:\n  - gpus: 1\n", 1, "nods", "nodes"),
    "unknown gpu": (
        "nodes:\n  - gpus: 1\n    type: A100-SXM-64GB\n",
        3,
        "A100-SXM-64GB",
        "mean A100-80?",
    ),
    "unknown model": (
        "nodes:\n  - gpus: 1\n    type: A101-40\n",
        3,
        "A101-40",
        "names that are known",
    ),
    "several devices without a link": (
        "nodes:\n  - gpus: 2\n    type: zzzzz\n    memory: 1 GiB\n    memory_bandwidth: 1 GB/s\n"
        "    flops: {float32: 1 TFLOP/s}\n",
        2,
        "not in the catalogue are unknown",
        "add inside",
    ),
    "gpu unlike any": ("nodes:\n  - gpus: 1\n    type: zzzzz\n", 3, "zzzzz", "give its memory"),
    "unknown gpu, half described": (
        "nodes:\n  - gpus: 1\n    type: zzzzz\n    memory: 1 GiB\n    memory_bandwidth: 1 GB/s\n"
        "    flops: {float16: 1 TFLOP/s}\n",
        3,
        "zzzzz",
        "give its flops: {float32: ..., float16: ..., bfloat16: ...}",
    ),
    "unknown dtype": (NODE + "    flops: {fp32: 1 TFLOP/s}\n", 4, "fp32", "float32"),
    "missing type": ("nodes:\n  - name: a\n    gpus: 2\n", 2, "'type' is missing", "V100"),
    "missing gpus": ("nodes:\n  - name: a\n    type: V100\n", 2, "'gpus' is missing", "gpus: 8"),
    "missing nodes": ("name: x\nlinks: {}\n", 1, "'nodes' is missing", "list"),
    "no nodes": ("name: x\nnodes: []\n", 2, "not a list", "dash"),
    "nodes not a list": ("name: x\nnodes: {gpus: 1}\n", 2, "not a list", "dash"),
    "node not a mapping": ("nodes:\n  - worker0\n", 2, "worker0", "key: value"),
    "empty file": ("\n\n", 1, "is empty", "nodes"),
    "no devices": ("nodes:\n  - gpus: 0\n    type: V100\n", 1, "no node has a GPU", "gpus: 1"),
    "negative count": (NODE + "    count: -1\n", 4, "count is -1", ">= 1"),
    "fractional gpus": ("nodes:\n  - gpus: 1.5\n    type: V100\n", 2, "gpus is 1.5", ">= 0"),
    "missing unit": (NODE + "    memory: 16\n", 4, "no unit", "16 GiB"),
    "wrong unit": (NODE + "    memory_bandwidth: 16 GiB\n", 4, "'GiB'", "GB/s"),
    "zero bandwidth": (NODE + "    memory_bandwidth: 0 GB/s\n", 4, "0 GB/s", "above zero"),
    "negative link": (NODE + "    inside: -3 GB/s\n", 4, "-3 GB/s", "above zero"),
    "negative latency": (
        NODE + "    inside: {bandwidth: 3 GB/s, latency: -1 us}\n",
        4,
        "-1 us",
        "zero or more",
    ),
    "link without bandwidth": (NODE + "    inside: {latency: 1 us}\n", 4, "missing", "10 Gbit/s"),
    "bad efficiency": (NODE + "    efficiency: {conv: fast}\n", 4, "conv", "positive number"),
    "no link between nodes": (NODE + "    count: 2\n", 1, "no link between", "between"),
    "type beside a list": ("nodes:\n  - gpus: [V100]\n    type: P100\n", 3, "list", "entry"),
    "two nodes of a name": (
        "links: {between: 1 GB/s}\nnodes:\n  - {gpus: 1, type: T4}\n  - {gpus: 1, type: T4}\n",
        3,
        "two nodes are named 'node'",
        "rename",
    ),
    "yaml syntax": (
        "nodes:\n  - gpus: [1\n    type: V100\n",
        3,
        "not valid yaml",
        "brackets|quotes",
    ),
    "yaml key twice": (NODE + "    gpus: 3\n", 4, "duplicate key", "this line"),
    "yaml control character": ("name: x\nnodes: \x07\n", 2, "#x0007", "control character"),
    "yaml date that is none": ("name: 2026-13-45\n" + NODE, 1, "timestamp", "quotes"),
    "yaml tag of an int": ("nodes:\n  - {gpus: !!int abc, type: V100}\n", 2, "int", "quotes"),
    "yaml int of 5000 digits": (NODE + f"    count: {'9' * 5000}\n", 4, "int", "quotes"),
    "yaml hex of 5000 digits": (NODE + f"    count: 0x{'f' * 5000}\n", 4, "too large", "quotes"),
    "too large for a float": (NODE + f"    drag: {'9' * 400}\n", 4, "too large", "quotes"),
    "too large for bytes": (NODE + "    memory: 1e400 GiB\n", 4, "too large", "16 GiB"),
    "hostfile: many slots": ("a slots=100000 type=T4\n\n", 1, "100,000 devices", "fewer"),
    "hostfile: many slots together": (
        "a slots=9000 type=T4\nb slots=9000 type=T4\n",
        2,
        "18,000 devices",
        "fewer",
    ),
    "hostfile: slots of 5000 digits": (f"a slots={'9' * 5000} type=T4\n\n", 1, "slots", "slots=8"),
    "hostfile: unknown gpu": (
        "a slots=2 type=V100\nb slots=2 type=V100-8\n",
        2,
        "V100-8",
        "V100-16?",
    ),
    "hostfile: unknown model": ("a slots=2 type=V10\n\n", 1, "V10", "names that are known"),
    "hostfile: no type": ("a slots=2\nb slots=2\n", 1, "no type", "type="),
    "hostfile: unknown key": ("a slots=2 type=T4\nb slot=2 type=T4\n", 2, "slot=2", "slots"),
    "hostfile: bad slots": ("a slots=two type=T4\n\n", 1, "two", "slots=8"),
    "hostfile: twice": ("a slots=2 type=T4\na slots=2 type=P100\n", 2, "twice", "yaml"),
    "hostfile: missing unit": (
        "# hap: between=10,1us\na slots=2 type=T4\n",
        1,
        "no unit",
        "Gbit/s",
    ),
    "hostfile: zero": ("# hap: between=0GB/s\na slots=2 type=T4\n", 1, "bandwidth", "positive"),
}


@pytest.mark.parametrize("case", BAD)
def test_complaints_name_the_line_and_the_remedy(case: str) -> None:
    text, line, what, hint = BAD[case]
    with pytest.raises(ClusterError) as caught:
        load_cluster(text)
    assert caught.value.where == f"<text>:{line}"
    assert what in caught.value.what
    assert any(part in caught.value.hint for part in hint.split("|"))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("no/such/file.yaml", "no such file"),
        ("local:x", "not a number of ranks"),
        ("local:0", "not a number of ranks"),
        (f"local:{'9' * 5000}", "not a number of ranks"),
        ("a slots=0 type=T4\n", "no GPUs"),
        ("a slots=2 type=T4\nb slots=2 type=T4\n", "no link between"),
    ],
)
def test_complaints_about_the_whole(given: str, what: str) -> None:
    with pytest.raises(ClusterError, match=what) as caught:
        load_cluster(given)
    assert caught.value.hint


def test_a_node_may_merge_another() -> None:
    text = (
        "links: {between: 1 GB/s}\nnodes:\n  - &a {name: a, gpus: 2, type: V100, memory: 9 GiB}\n"
        "  - <<: *a\n    name: b\n"
    )
    first, _, merged, _ = load_cluster(text).devices
    assert (merged.node, merged.memory_bytes) == ("b", first.memory_bytes)
    assert merged.source["memory_bytes"] == "<text>:4"  # of the node: the line is another's


def test_a_file_is_named_in_its_complaints(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(NODE + "    kount: 2\n")
    with pytest.raises(ClusterError) as caught:
        load_cluster(path)
    assert str(caught.value) == "mine.yaml:4: unknown key 'kount'\n  hint: did you mean 'count'?"


def test_a_file_in_another_encoding_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(NODE, encoding="utf-16")
    with pytest.raises(ClusterError, match="save it as UTF-8"):
        load_cluster(path)


def test_the_module_stays_light() -> None:
    """Planning reads clusters from plan files, so the module needs neither a parser nor torch."""
    code = (
        "import sys, hap.cluster; print(*{'torch', 'numpy', 'pydantic', 'ruamel'} & {*sys.modules})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
