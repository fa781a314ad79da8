"""Stands in for the kernels where there is no GPU: `rehearsal.py LIBRARY` runs calibration and correctness on the CPU.

Each call goes to the real op first, which must refuse it for one reason only, that its tensors are on the CPU: schemas,
checks and sizes are the real ones. What the kernels would write is then composed from fp32 torch, once all ranks have
called. A wrong test is found here and not on the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Call = dict[str, Any]


class StandIn:
    """Looks like torch.ops.interlace; `faults` makes the composed results wrong, to see that the part notices."""

    def __init__(self, real: Any, *, faulty: str = "") -> None:
        self._real = real
        self._faulty = faulty
        self._waiting: dict[str, list[Call]] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = getattr(self._real, name)
        schema = op.default._schema
        if not any("Tensor" in str(argument.type) for argument in schema.arguments):
            return op

        def call(*arguments: Any) -> None:
            try:
                op(*arguments)
            except RuntimeError as error:
                assert "got a CPU tensor" in str(error), f"{name}: {error}"
            named = {a.name: a.default_value for a in schema.arguments}
            named.update(zip(named, arguments, strict=False))
            self._play(name, named)

        return call

    def _play(self, name: str, call: Call) -> None:
        calls = self._waiting.setdefault(name, [])
        calls.append(call)
        if len(calls) < len(call.get("segments", [0])):
            return
        del self._waiting[name]
        ranks = [c.get("rank", 0) for c in calls]
        assert ranks == list(range(len(calls))), f"{name}: ranks {ranks}"
        COMPOSED[name](calls)
        if name == self._faulty:
            written = next(t for t in _written(calls[-1]) if t.numel() > 0)
            written.view(-1)[-1] += 1


def _written(call: Call) -> list[Tensor]:
    found: list[Tensor] = []
    for key in ("outs", "out", "sums", "normalised", "gathered"):
        value = call.get(key)
        found += value if isinstance(value, list) else [] if value is None else [value]
    return found


def _product(call: Call, x: Tensor, index: int, x_scale: Tensor | None) -> Tensor:
    value = x.float() @ call["weights"][index].float().t()
    if x_scale is not None:
        value = value * x_scale.reshape(-1, 1) * call["weight_scales"][index].reshape(1, -1)
    return value


def _summed(call: Call) -> Tensor:
    xs = call["xs"]
    return torch.stack([_product(call, x, p, call["x_scale"]) for p, x in enumerate(xs)]).sum(0)


def _gemm(calls: list[Call]) -> None:
    (call,) = calls
    values = (
        [_summed(call)]
        if call["summed"]
        else [_product(call, call["xs"][0], p, call["x_scale"]) for p in range(len(call["weights"]))]
    )
    for value, bias, out in zip(values, call["biases"], call["outs"], strict=True):
        value = value if bias is None else value + bias.float()
        value = value if call["residual"] is None else value + call["residual"].float()
        out.copy_(value)


def _all_gather_gemm(calls: list[Call]) -> None:
    whole = torch.cat([c["x"].float() for c in calls])
    scales = None if calls[0]["x_scale"] is None else torch.cat([c["x_scale"] for c in calls])
    for call in calls:
        if call["gathered"] is not None:
            call["gathered"].copy_(whole)
        for p, (bias, out) in enumerate(zip(call["biases"], call["outs"], strict=True)):
            value = _product(call, whole, p, scales)
            out.copy_(value if bias is None else value + bias.float())


def _own(call: Call, whole: Tensor) -> Tensor:
    if "rows" not in call:
        return whole
    begin = sum(call["rows"][: call["rank"]])
    return whole[begin : begin + call["rows"][call["rank"]]]


def _behind(call: Call, whole: Tensor, sums: Tensor | None, normalised: Tensor | None) -> None:
    value = _own(call, whole)
    value = value if call["bias"] is None else value + call["bias"].float()
    value = value if call["residual"] is None else value + call["residual"].float()
    target = normalised if sums is None else sums
    assert target is not None
    value = value.to(target.dtype)
    if sums is not None:
        sums.copy_(value)
    if normalised is not None:
        norm = value.float() * torch.rsqrt(value.float().square().mean(-1, keepdim=True) + call["eps"])
        normalised.copy_(norm if call["norm_weight"] is None else norm * call["norm_weight"].float())


def _gemm_reduce(calls: list[Call]) -> None:
    whole = torch.stack([_summed(c) for c in calls]).sum(0)
    for call in calls:
        _behind(call, whole, call["out"], call["normalised"])


def _reduce_norm(calls: list[Call]) -> None:
    whole = torch.stack([c["input"].float() for c in calls]).sum(0)
    for call in calls:
        _behind(call, whole, call["sums"], call["out"])


def _all_reduce(calls: list[Call]) -> None:
    whole = torch.stack([c["inputs"][0].float() for c in calls]).sum(0)
    for call in calls:
        call["outs"][0].copy_(whole)


def _reduce_scatter(calls: list[Call]) -> None:
    whole = torch.stack([c["x"].float() for c in calls]).sum(0)
    for call in calls:
        call["out"].copy_(_own(call, whole))


def _all_gather(calls: list[Call]) -> None:
    for call in calls:
        call["out"].copy_(torch.cat([c["x"] for c in calls]))


def _all_to_all(calls: list[Call]) -> None:
    pieces = [c["x"].split(c["sent"]) for c in calls]
    for call in calls:
        call["out"].copy_(torch.cat([of_rank[call["rank"]] for of_rank in pieces]))


COMPOSED: dict[str, Callable[[list[Call]], None]] = {
    "_device_gemm": _gemm,
    "_device_all_gather_gemm": _all_gather_gemm,
    "_device_gemm_reduce_scatter": _gemm_reduce,
    "_device_gemm_all_reduce": _gemm_reduce,
    "_device_one_shot_all_reduce": _all_reduce,
    "_device_two_shot_all_reduce": _all_reduce,
    "_device_one_shot_all_reduce_norm": _reduce_norm,
    "_device_two_shot_all_reduce_norm": _reduce_norm,
    "_device_reduce_scatter_norm": _reduce_norm,
    "_device_reduce_scatter": _reduce_scatter,
    "_device_all_gather": _all_gather,
    "_device_all_to_all": _all_to_all,
    "_device_copy_engine_all_gather": _all_gather,
}


def main(library: str) -> None:
    """Run the part rightly, then once with each op's result made wrong: the part must notice every time."""
    from tests.device.gpu import calibration, correctness, launches
    from tests.device.gpu.problems import small

    torch.ops.load_library(library)
    real = torch.ops.interlace
    ran = 0
    launches.OPS = StandIn(real)
    for case in (*calibration.cases("cpu"), *correctness.cases(small("cpu"))):
        try:
            case.run()
        except Exception as error:
            raise AssertionError(case.name) from error
        ran += 1
    for name in COMPOSED:
        launches.OPS = StandIn(real, faulty=name)
        caught = False
        for case in correctness.cases(small("cpu")):
            try:
                case.run()
            except AssertionError:
                caught = True
                break
        assert caught, f"a wrong {name} is not noticed"
    print(f"{ran} cases rehearsed, {len(COMPOSED)} faults noticed")


if __name__ == "__main__":
    main(sys.argv[1])
