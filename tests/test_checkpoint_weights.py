"""Ordinary weights: a checkpoint's are exported, and others start a run."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as torch_load

import hap
from hap.errors import CheckpointError, InputError
from hap.runtime.checkpoints import checkpoint_weights
from hap.runtime.checkpoints.checkpoint_weights import export, import_
from hap.runtime.launch import spawn
from tests.checkpoint_runs import Run, net, stage
from tests.random_plans import random_plan


def whole(run: Run) -> dict[str, torch.Tensor]:
    return run.module.state_dict()


@pytest.mark.slow
@pytest.mark.gloo
def test_shards_are_exported_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into one file, and into several with a list of them."""
    plan, folder = random_plan(net(), 3, 2), str(tmp_path / "checkpoints")
    spawn(stage, 3, args=(plan.to_json(), folder, 2), timeout_s=240)
    reference = Run(None)
    reference.train(0, 2)
    for largest in (2**30, 2000):
        monkeypatch.setattr(checkpoint_weights, "LARGEST_FILE_BYTES", largest)
        out = tmp_path / f"out-{largest}"
        step, count, files = export(folder, str(out))
        assert (step, count) == (2, len(whole(reference)))
        names = sorted(out.glob("*.safetensors"))
        assert len(names) == files and (files > 1) == (largest == 2000)
        found = {name: t for file in names for name, t in load_file(file).items()}
        if files > 1:
            listed = json.loads((out / "model.safetensors.index.json").read_text())
            assert listed["weight_map"].keys() == found.keys()
        fresh = copy.deepcopy(net().model)
        fresh.load_state_dict(found)
        for name, value in whole(reference).items():
            torch.testing.assert_close(fresh.state_dict()[name], value, rtol=1e-9, atol=1e-9)
    read = {"model/up.weight": torch.zeros(20, 8, dtype=torch.float64)}
    torch_load(read, storage_reader=HuggingFaceStorageReader(f"{folder}/step-2"), no_dist=True)
    torch.testing.assert_close(read["model/up.weight"], found["up.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["folder", "file", "state_dict", "nested", "half"])
def test_weights_start_a_run(kind: str, tmp_path: Path) -> None:
    source = Run(None, shift=0.25)
    source.module.hidden.zero_()  # not persistent, so no file has it
    source.save(tmp_path / "saved", 0, block=True)
    export(str(tmp_path / "saved"), str(tmp_path / "out"))
    weights: Any = tmp_path / "out"
    if kind == "file":
        weights = weights / "model.safetensors"
    elif kind != "folder":
        weights = tmp_path / "weights.pt"
        state = whole(source)
        if kind == "half":
            state = {n: t.half() if t.is_floating_point() else t for n, t in state.items()}
        torch.save({"model": state, "epoch": 3} if kind == "nested" else state, weights)
    count = import_(str(weights), str(tmp_path / "start"))
    assert count == len(whole(source))
    run = Run(random_plan(net(), 1, 0))
    found = run.load(tmp_path / "start")
    assert found.weights_only and found.step == 0
    close = 1e-2 if kind == "half" else 0
    want = whole(source)
    for name, value in run.module.full_state_dict().items():
        torch.testing.assert_close(value, want[name], rtol=close, atol=close, msg=name)
    if kind != "half":
        assert run.train(0, 3) == pytest.approx(source.train(0, 3), abs=1e-9)


def test_names_without_their_ties_are_enough(tmp_path: Path) -> None:
    """Files of transformers hold a tied tensor once, under either name."""
    state = whole(Run(None, shift=0.5))
    del state["embed.weight"]
    torch.save(state, tmp_path / "weights.pt")
    import_(str(tmp_path / "weights.pt"), str(tmp_path / "start"))
    run = Run(None)
    run.load(tmp_path / "start")
    assert torch.equal(run.module.state_dict()["embed.weight"], state["head.weight"])


def test_transformers_loads_what_is_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        vocab_size=40, max_position_embeddings=12,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config)
    hap.save(model, None, tmp_path / "saved", step=1, block=True)
    export(str(tmp_path / "saved"), str(tmp_path / "out"))
    config.save_pretrained(tmp_path / "out")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out")
    want = model.state_dict()
    assert again.state_dict().keys() == want.keys()
    assert all(torch.equal(t, want[n]) for n, t in again.state_dict().items())
    again.save_pretrained(tmp_path / "theirs")
    import_(str(tmp_path / "theirs"), str(tmp_path / "start"))
    other = transformers.BertForMaskedLM(config)
    hap.load(other, None, tmp_path / "start")
    assert all(torch.equal(t, want[n]) for n, t in other.state_dict().items())


def test_what_cannot_be_imported_or_exported(tmp_path: Path) -> None:
    def refused(message: str, weights: str | Path, to: str = "new") -> None:
        with pytest.raises(InputError, match=message):
            import_(str(weights), str(tmp_path / to))
        assert not (tmp_path / to / "step-0").exists()

    refused("no such file or folder", tmp_path / "absent")
    refused("no safetensors in this folder", tmp_path)
    (tmp_path / "text.pt").write_text("hello")
    refused("no state_dict that can be read safely", tmp_path / "text.pt")
    (tmp_path / "text.safetensors").write_text("hello")
    refused("damaged, or no safetensors file", tmp_path / "text.safetensors")
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    refused("no state_dict that can be read safely", tmp_path / "module.pt")
    torch.save({"a": 3}, tmp_path / "number.pt")
    refused("not names and tensors alone", tmp_path / "number.pt")
    for number, content in enumerate([b"\x80\x02.", b"\x80\x02G."]):  # IndexError, struct.error
        (tmp_path / f"{number}.pt").write_bytes(content)
        refused("no state_dict that can be read safely", tmp_path / f"{number}.pt")
    torch.save({"a": torch.ones(2)}, tmp_path / "fine.pt")
    import_(str(tmp_path / "fine.pt"), str(tmp_path / "start"))
    with pytest.raises(InputError, match="there are checkpoints already"):
        import_(str(tmp_path / "fine.pt"), str(tmp_path / "start"))
    with pytest.raises(InputError, match="a folder with files"):
        export(str(tmp_path / "start"), str(tmp_path))
    with pytest.raises(InputError, match="no such folder"):
        export(str(tmp_path / "absent"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes",
    [{"chunks": [[[-1], [2], "F"]]}, {"chunks": [[[-1], [1], "F"]], "shape": [1]}, {"chunks": [[[1], [2], "F"]]},
     {"shape": [2, 1]}, {"shape": [-2], "chunks": [[[0], [-2], "F"]]}],
)  # fmt: skip
def test_chunks_beyond_their_tensor_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "fine.pt")
    import_(str(tmp_path / "fine.pt"), str(tmp_path / "ck"))
    path = tmp_path / "ck" / "step-0" / "checkpoint.json"
    index = json.loads(path.read_text())
    ((name, entry),) = index["tensors"].items()
    index["tensors"][name] = entry | changes
    path.write_text(json.dumps(index).replace('"F"', json.dumps(entry["chunks"][0][2])))
    with pytest.raises(CheckpointError, match=r"checkpoint.json is damaged \(ValueError"):
        export(str(tmp_path / "ck"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
