"""The program the planner prints runs: mesh, parallelize, fully_shard and schedules on CPU processes, and it trains
what an unsplit model trains.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interlace.checkpoint import full_state_dict
from interlace.planner.layout import Layout
from interlace.planner.snippet import launch_line, serving_snippet, train_line, training_snippet
from interlace.planner.workload import Training
from tests.distributed import run_distributed

pytest.importorskip("transformers")

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 54,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
TRAINING = Training(global_batch=4, seq=12, dtype="fp32")


def source(**sizes: Any) -> str:
    """The program of a layout, without the end of the process group, which the workers keep."""
    layout = Layout(**{"dp": 1, "tp": 1, "pp": 1, "cp": 1, "zero": 0, "microbatches": 2, **sizes})
    text = training_snippet(layout, TRAINING, 4, config=TINY)
    assert "dist.destroy_process_group()\n" in text
    text = text.replace("dist.destroy_process_group()\n", "")
    # attention is replaced for the whole process, and the workers live on
    return text.replace("replace_attention(Context", "restore = replace_attention(Context")


def execute(program: str) -> dict[str, Any]:
    """What a program leaves behind, as torchrun would run it on this rank."""
    left: dict[str, Any] = {"__name__": "layout"}
    exec(compile(program, "layout.py", "exec"), left)
    return left


def unsplit_losses(replicas: int, program: str) -> list[float]:
    """Mean loss of each step of the same program's model and tokens without any split, by plain torch."""
    left: dict[str, Any] = {"__name__": "layout"}
    head = program.partition("mesh = ")[0] + "from transformers import AutoConfig, AutoModelForCausalLM\n"
    exec(
        head
        + "config = AutoConfig"
        + program.partition("config = AutoConfig")[2].partition("\n)\n")[0]
        + "\n)\n",
        left,
    )
    torch.manual_seed(0)
    model = left["AutoModelForCausalLM"].from_config(left["config"])
    generators = [torch.Generator().manual_seed(rank) for rank in range(replicas)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        last = []
        for _ in range(2):
            for generator in generators:
                tokens = torch.randint(61, (1, 13), generator=generator)
                logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
                loss = nn.functional.cross_entropy(logits.flatten(0, -2), tokens[:, 1:].flatten())
                (loss / (2 * replicas)).backward()
                last.append(loss.item())
        losses.append(last[-1])  # the program prints the last microbatch of the last rank
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _whole(rank: int, world_size: int, programs: list[tuple[int, str]]) -> list[tuple[float, float]]:
    """(loss after three steps, the unsplit one) of each program, where the last rank is.

    The loss is that of the last replica: the mean over its context ranks, which have equally many tokens.
    """
    import torch.distributed as dist

    found = []
    for replicas, program in programs:
        left = execute(program)
        loss, mesh = left["loss"].detach(), left["mesh"]
        dist.all_reduce(loss, group=mesh["cp"].get_group())
        loss = loss.item() / mesh["cp"].size()
        left.get("restore", int)()
        del left, mesh
        gc.collect()  # the program's functions and its names hold each other, and with them its groups
        if rank == world_size - 1:
            found.append((loss, unsplit_losses(replicas, program)[-1]))
    return found


def _unsplit_stages(left: dict[str, Any], parts: list[tuple[list[int], dict[str, Tensor]]]) -> float:
    """Loss of the stages' weights put together, on the tokens of the first batch."""
    from transformers import AutoModelForCausalLM

    state = {}
    for layers, weights in parts:
        for name, value in weights.items():
            number = name.split(".")[2] if name.startswith("model.layers.") else ""
            if number:
                name = name.replace(f"layers.{number}.", f"layers.{layers[int(number)]}.", 1)
            state[name] = value
    model = AutoModelForCausalLM.from_config(left["config"])
    model.load_state_dict(state)
    tokens = torch.randint(61, (2, 13), generator=torch.Generator().manual_seed(0))
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, -2), tokens[:, 1:].flatten()).item()


def _pipelined(rank: int, world_size: int, programs: list[str]) -> list[tuple[float, float]]:
    """(loss of one step, loss of the stages' weights put together) of each program, where the last stage is."""
    found = []
    for program in programs:
        found += _one_pipelined(rank, world_size, program)
        gc.collect()
    return found


def _one_pipelined(rank: int, world_size: int, program: str) -> list[tuple[float, float]]:
    import torch.distributed as dist

    left = execute(program.replace("STEPS = 1, 2, 12, 3", "STEPS = 1, 2, 12, 1").replace("lr=1e-4", "lr=0.0"))
    mine = [
        (list(left["PARTS"][stage.stage_index]), full_state_dict(stage.submod.model))
        for stage in left["stages"]
    ]
    every: list[Any] = [None] * world_size
    dist.all_gather_object(every, mine)
    if rank < world_size - 1:
        return []
    return [(left["loss"].item(), _unsplit_stages(left, [part for parts in every for part in parts]))]


def test_data_tensor_and_context_parallel_programs_train_like_the_unsplit_model() -> None:
    """Losses after two optimizer steps: gradients summed once too often or not at all would show in the third."""
    programs = [
        (2, source(dp=2, zero=1, sequence_parallel=False)),
        (1, source(tp=2)),
        (2, source(dp=2, zero=0, sequence_parallel=False)),
        (1, source(cp=2, zero=1, sequence_parallel=False)),
    ]
    for ours, unsplit in run_distributed(2, _whole, programs)[-1]:
        assert ours == pytest.approx(unsplit, abs=2e-5)


def test_pipeline_programs_compute_the_loss_of_their_stages_put_together() -> None:
    """One and two chunks per rank; a layer lost, doubled or out of order changes the loss."""
    programs = [
        source(pp=2, sequence_parallel=False),
        source(pp=2, interleave=2, schedule="interleaved", sequence_parallel=False),
    ]
    for ours, unsplit in run_distributed(2, _pipelined, programs)[-1]:
        assert ours == pytest.approx(unsplit, abs=2e-5)


def _four(rank: int, world_size: int, zero: str, staged: str) -> list[tuple[float, float]]:
    found = _whole(rank, world_size, [(2, zero)])
    return found + _pipelined(rank, world_size, [staged])


def test_all_axes_of_four_ranks_train() -> None:
    """ZeRO-3 lies over tensor parallelism; sequence-parallel stages carry shards between them."""
    programs = source(dp=2, tp=2, zero=3), source(tp=2, pp=2)
    for ours, unsplit in run_distributed(4, _four, *programs)[-1]:
        assert ours == pytest.approx(unsplit, abs=2e-5)


def test_every_layout_gives_a_program_that_compiles() -> None:
    """Also those that no other test runs: two axes beside stages, two replicas without ZeRO, recomputation."""
    for sizes in (
        {"cp": 2, "dp": 2, "zero": 1},
        {"cp": 2, "dp": 1, "pp": 2, "zero": 1},
        {"dp": 2, "pp": 2, "zero": 0},
        {"pp": 2, "zero": 1, "schedule": "zero_bubble", "recompute": "full"},
    ):
        program = source(**sizes)
        compile(program, "layout.py", "exec")
        assert ("replace_attention(" in program) == (sizes.get("cp", 1) > 1)
    assert "sys.argv[1]" in training_snippet(Layout(2, 1, 1, 1), TRAINING, 4)


def _generated(rank: int, world_size: int, program: str) -> tuple[list[int], list[int]]:
    left = execute(program)
    torch.manual_seed(0)
    whole = left["AutoModelForCausalLM"].from_config(left["config"], dtype=torch.float32).eval()
    expected = whole.generate(left["ids"], max_new_tokens=8, do_sample=False)
    found = left["out"][0, 16:].tolist(), expected[0, 16:].tolist()
    left.clear()
    gc.collect()
    return found


def test_the_serving_program_generates_what_the_unsplit_model_does() -> None:
    """On both ranks of a replica, in fp32 so that no tie is broken by rounding."""
    program = serving_snippet(Layout(1, 2, 1, 1), config=TINY)
    program = program.replace("dist.destroy_process_group()\n", "").replace("torch.bfloat16", "torch.float32")
    for found, expected in run_distributed(2, _generated, program):
        assert found == expected


def test_command_lines_name_nodes_and_every_size() -> None:
    """One machine, several machines, and what `interlace train` does not run."""
    layout = Layout(4, 2, 2, 1, zero=1, microbatch=2)
    assert launch_line(layout, 16, "x.py") == "torchrun --standalone --nproc-per-node 16 x.py"
    assert "--nnodes 2 --nproc-per-node 8" in launch_line(layout, 8, "x.py")
    line = train_line(layout, TRAINING, 16, "my model.json")
    assert line.startswith("interlace train --model 'my model.json' --dp 4 --tp 2 --pp 2")
    assert "-m interlace.train" in train_line(layout, TRAINING, 8, "m")
    assert train_line(Layout(1, 1, 1, 2), TRAINING, 8, "m") == ""


def test_a_program_names_what_it_leaves_out() -> None:
    spread = Layout(dp=4, tp=1, pp=1, cp=1, ep=4, zero=0, microbatches=1)
    assert "Not in this program: experts over ep=4" in training_snippet(spread, TRAINING, 4, config=TINY)
    assert "Not in this program: the 2 stages" in serving_snippet(Layout(1, 2, 2, 1), config=TINY)
    assert "Not in this program" not in source(dp=2)
