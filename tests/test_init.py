"""``hap init``: its files plan at once, GPUs by their names, and nothing is overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hap.cli import machine_devices
from hap.cli.commands import main
from hap.cli.machine_devices import Found, gpus, listed
from hap.cluster.cluster_file import load_cluster
from hap.errors import ClusterError, InputError
from hap.ir.plan import Plan


def init(*words: str) -> Result:
    result = CliRunner().invoke(main, ["init", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.mark.parametrize(
    "found",
    [
        [Found(kind="cpu", count=2)],
        gpus([("Tesla P100-PCIE-16GB", 16 << 30), *[("NVIDIA A100-SXM4-40GB", 40 << 30)] * 2]),
    ],
)
def test_what_it_writes_plans_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[Found]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_devices, "devices", lambda: ("a test", found))
    assert init("lab").exit_code == 0
    devices = load_cluster("lab/cluster.yaml").devices
    assert [d.kind for d in devices] == [f.kind for f in found for _ in range(f.count)]
    command = ["plan", "lab/model.py", "--cluster", "lab/cluster.yaml"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    assert Plan.load("plan.json").batch_size == 64


def test_this_machine_has_devices(tmp_path: Path) -> None:
    assert init(str(tmp_path / "new")).exit_code == 0
    assert load_cluster(tmp_path / "new" / "cluster.yaml").world_size >= 1


def test_files_are_overwritten_with_force_alone(tmp_path: Path) -> None:
    mine = tmp_path / "cluster.yaml"
    mine.write_text("mine")
    result = init(str(tmp_path))
    assert result.exit_code == 2
    assert "cluster.yaml: the file exists" in result.stderr
    assert mine.read_text() == "mine"
    assert not (tmp_path / "model.py").exists(), "nothing is written"
    assert init(str(tmp_path), "--force").exit_code == 0
    assert mine.read_text() != "mine"


def test_a_doubtful_gpu_is_told_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown one keeps the driver's name and memory, and `hap plan` asks for its figures."""
    part = 'NVIDIA A100-SXM4-40GB MIG "1g.5gb"'
    found = gpus([("A100-SXM-64GB", 64 << 30), (part, 5 << 30), (part, 5 << 30)])
    monkeypatch.setattr(machine_devices, "devices", lambda: ("a test", found[1:]))
    said = init(str(tmp_path)).stdout
    assert f"{part} is not in the catalogue: add its flops" in said
    file = tmp_path / "cluster.yaml"
    with pytest.raises(ClusterError) as error:
        load_cluster(file)
    assert error.value.hint.startswith("give its flops: {float32:")
    completed = file.read_text().replace(
        "count: 2,", "count: 2, flops: {float32: 1 TFLOP/s}, memory_bandwidth: 200 GB/s,"
    )
    device, _ = load_cluster(completed).devices
    assert (device.kind, device.memory_bytes) == (part, 4812 << 20)
    monkeypatch.setattr(machine_devices, "devices", lambda: ("a test", found))
    assert "the figures are those of A100-80, check them" in init(str(tmp_path), "--force").stdout


def test_gpus_get_the_catalogues_names() -> None:
    text = "NVIDIA H200, 143771\nNVIDIA H200, 143771\nNVIDIA A100-SXM4-80GB SXM, 81920\n"
    known, near = gpus(listed(text))
    assert (known.kind, known.count, known.memory) == ("H200", 2, "135144 MiB")
    assert near.kind == "A100-80"
    assert "check them" in near.comment
    assert not known.comment
    with pytest.raises(InputError, match="without its memory"):
        listed("NVIDIA H200, [N/A]\n")
