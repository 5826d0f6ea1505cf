"""Hostile model files: faults of ``model()``, ``batch()``, ``loss()`` and the rest."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.hostile.case import MODEL, Case

PLAN = ("plan", "model.py", "--cluster", "cluster.yaml")

BATCHES = {
    "None": "None", "an int": "3", "text": "'abc'", "an empty tuple": "()", "an empty dict": "{}",
    "no rows": "torch.zeros(0, 16)", "one row": "torch.zeros(1, 16)", "a scalar": "torch.zeros(())",
    "a set": "{1, 2}", "a generator": "(x for x in [torch.zeros(8, 16)])",
    "complex numbers": "torch.zeros(8, 16, dtype=torch.complex64)",
    "integers": "torch.zeros(8, 16, dtype=torch.int64)",
    "that requires grad": "torch.zeros(8, 16, requires_grad=True)",
    "a parameter": "nn.Parameter(torch.zeros(8, 16))",
    "sparse": "torch.zeros(8, 16).to_sparse()",
    "quantized": "torch.quantize_per_tensor(torch.zeros(8, 16), 0.1, 0, torch.qint8)",
    "numpy": "__import__('numpy').zeros((8, 16))", "another width": "torch.zeros(8, 17)",
    "a nested cycle": "(lambda l: (l.append(l), l)[1])([])",
    "a named tuple": "__import__('collections').namedtuple('B', 'x')(torch.zeros(8, 16))",
    "a class": "torch.Tensor", "a module": "nn.Linear(2, 2)", "infinite numbers": "float('inf')",
    "nested lists of numbers": "[[0.0] * 16] * 8", "keys that are no text": "{1: torch.zeros(8, 16)}",
    "a batch of no argument's name": "{'y': torch.zeros(8, 16)}",
    "a huge batch": "torch.zeros(2**40, 16)",
}  # fmt: skip
"""Name -> expression of the batch."""

MODELS = {
    "None": "None", "an int": "3", "the class": "Net", "a list": "[Net()]", "a tensor": "torch.zeros(3)",
    "a function": "lambda x: x", "a lazy module": "nn.LazyLinear(3)", "a scripted one": "torch.jit.script(nn.Linear(16, 16))",
    "an empty sequence": "nn.Sequential()", "no parameter": "nn.ReLU()",
    "frozen": "Net().requires_grad_(False)", "a missing name": "Missing()", "a division by zero": "1 / 0",
    "sys.exit": "__import__('sys').exit(3)", "an exit with text": "exit('bye')",
    "a keyboard interrupt's cousin": "(_ for _ in ()).throw(GeneratorExit)",
    "a system error": "(_ for _ in ()).throw(SystemError('x'))", "deep recursion": "model()",
    "complex": "Net().to(torch.complex64)", "integers": "Net().to(torch.int8)",
    "an optimizer": "torch.optim.SGD(Net().parameters())", "a device that is absent": "Net().to('cuda:7')",
    "a module without forward": "nn.Module()", "an import that fails": "__import__('no_such_module')",
    "2**31 rows of embeddings": "nn.Embedding(2**31 + 8, 4096)",
    "2**62 elements": "nn.Linear(2**31, 2**31)", "a parameter of no elements": "nn.Linear(16, 0)",
    "memory of the machine": "Net() if bytearray(2**60) else 0",
}  # fmt: skip
"""Name -> expression of the model."""

FORWARDS = {
    "returns None": "return None", "returns text": "return 'x'", "returns a number": "return 3.0",
    "returns nothing of the inputs": "return torch.zeros(8, 16)",
    "changes a parameter": "self.up.weight.data.add_(1.0); return self.down(self.up(x))",
    "changes a parameter in no_grad": "\n        with torch.no_grad():\n            self.up.weight.add_(1.0)\n        return self.down(self.up(x))",
    "resizes the input": "return x.resize_(4, 32)", "reads a value": "return self.down(self.up(x)) if x.sum() > 0 else x",
    "prints a value": "print(x.sum().item()); return self.down(self.up(x))",
    "uses numpy": "return torch.from_numpy(x.numpy())", "data-dependent shape": "return x[x > 0]",
    "nonzero": "return x.nonzero().float()", "unique": "return torch.unique(x)",
    "raises": "raise ValueError('mine')", "asserts": "assert x.shape[0] == 3; return x",
    "wrong shapes": "return self.up(x) @ x",
    "draws from numpy": "return x + float(__import__('random').random())",
    "backward inside": "x.sum().backward(); return x", "detached": "return self.down(self.up(x)).detach()",
    "in no_grad": "\n        with torch.no_grad():\n            return self.down(self.up(x))",
    "in inference mode": "\n        with torch.inference_mode():\n            return self.down(self.up(x))",
    "opens a file": "open('missing'); return x", "complex numbers": "return torch.fft.fft(self.up(x))",
    "sorts by itself": "return self.down(self.up(x)).sort()", "a set": "return {self.up(x)}",
    "sets an attribute": "self.kept = x; return self.down(self.up(x))",
    "makes a parameter": "self.new = nn.Parameter(torch.zeros(3)); return self.down(self.up(x))",
    "deletes a parameter": "del self.up; return x", "a cuda tensor": "return x.cuda()",
    "a thread": "import threading; threading.Thread(target=print).start(); return self.down(self.up(x))",
    "distributed": "torch.distributed.all_reduce(x); return self.down(self.up(x))",
}  # fmt: skip
"""Name -> body of the forward."""

LOSSES = {
    "a vector": "return (output - batch)", "None": "return None", "a number": "return 3.0",
    "no gradient": "return torch.zeros(())", "detached": "return output.detach().mean()",
    "of item": "return output.mean().item()", "raises": "raise KeyError('label')",
    "an integer": "return (output > 0).sum()", "a tuple": "return output.mean(), output.mean()",
    "complex": "return output.mean().to(torch.complex64)", "bool": "return (output > 0).any()",
    "changes the output": "output.zero_(); return output.mean()", "too many arguments": "return loss(1, 2, 3)",
    "one element of a dim": "return output.mean().reshape(1)", "of the batch alone": "return batch.mean()",
    "argmax": "return output.argmax().float()", "backward": "output.mean().backward(); return output.mean()",
}  # fmt: skip
"""Name -> body of the loss."""

LINES = {
    "a syntax error": "def broken(:\n", "an indentation error": "  x = 1\n y = 2\n",
    "an import": "import no_such_module\n", "an error at the top": "raise RuntimeError('top')\n",
    "exit at the top": "import sys; sys.exit(0)\n", "a null byte": "x = '\0'\n",
    "model is text": "model = 'x'\n", "batch is a tensor": "batch = torch.zeros(8, 16)\n",
    "loss is text": "loss = 'mse'\n", "a seed of text": "seed = 'x'\n", "a seed out of range": "seed = 2**80\n",
    "a negative seed": "seed = -1\n",
    "rules of numbers": "rules = 3\n", "a rule of nonsense": "rules = {'aten.mm.default': ['x -> -> y']}\n",
    "autocast of ints": "autocast = 'int8'\n", "autocast of numbers": "autocast = 16\n",
    "model with arguments": "def model(a, b):\n    return Net()\n",
    "batch with arguments": "def batch(n):\n    return torch.zeros(n, 16)\n",
    "an optimizer of nothing": "def optimizer(params):\n    return None\n",
    "an unknown optimizer": "class O(torch.optim.Optimizer):\n    def step(self): pass\n"
    "def optimizer(params):\n    return O(list(params), {})\n",
    "an optimizer that raises": "def optimizer(params):\n    raise ValueError('lr')\n",
    "an optimizer of a negative rate": "def optimizer(params):\n    return torch.optim.SGD(params, lr=-1)\n",
    "no batch": "del batch\n", "no model": "del model\n", "a star import": "from os import *\n",
    "recursive model": "def model():\n    return model()\n",
    "a generator model": "def model():\n    yield Net()\n", "an async model": "async def model():\n    return Net()\n",
}  # fmt: skip
"""Name -> lines appended to the file."""

RIGHT = {"batch a list of one": MODEL.replace("torch.zeros(8, 16)", "[torch.zeros(8, 16)]")}

MAY_PLAN = {  # exit 0 is as good an answer as an error
    "batch: integers", "batch: quantized", "batch: a huge batch", "batch: a parameter", "model: 2**31 rows of embeddings",
    "model: 2**62 elements", "model: a scripted one", "forward: sets an attribute", "forward: a thread",
    "forward: changes a parameter", "forward: prints a value", "forward: draws from numpy",
    "loss: one element of a dim", "forward: sorts by itself",
    "line: a star import", "line: a seed out of range", "line: a negative seed",
    "line: an unknown optimizer", "line: a rule of nonsense", 
    "model: a parameter of no elements", "loss: changes the output", "forward: in no_grad",
    "line: loss is text", "model: an empty sequence", "loss: a tuple", "model: a device that is absent",
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Yield every fault of a model file, planned."""

    def case(name: str, text: str) -> Case:
        exits = (0, 2, 3) if name in MAY_PLAN else (2, 3)
        return Case(kind="model", name=name, argv=PLAN, files={"model.py": text}, exits=exits)

    for name, value in BATCHES.items():
        yield case(f"batch: {name}", MODEL.replace("return torch.zeros(8, 16)", f"return {value}"))
    for name, value in MODELS.items():
        yield case(f"model: {name}", MODEL.replace("return Net()", f"return {value}"))
    for name, body in FORWARDS.items():
        old = "return self.down(torch.relu(self.up(x)))"
        yield case(f"forward: {name}", MODEL.replace(old, body))
    for name, body in LOSSES.items():
        yield case(f"loss: {name}", MODEL.replace("return (output - batch).square().mean()", body))
    for name, lines in LINES.items():
        yield case(f"line: {name}", MODEL + "\n" + lines)
    for name, content in {
        "binary": bytes(range(256)) * 8,
        "empty": b"",
        "utf-16": MODEL.encode("utf-16"),
    }.items():
        yield Case(kind="model", name=f"file: {name}", argv=PLAN, files={"model.py": content})
