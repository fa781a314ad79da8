"""A program that runs a layout: mesh, the model or its stages, parallelize, fully_shard, schedule, a few steps."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from .layout import Layout
from .pipeline import stage_layers
from .workload import Training

__all__ = ["launch_line", "not_in_program", "serving_snippet", "train_line", "training_snippet"]

_SCHEDULE_CLASS = {
    "1f1b": "Schedule1F1B",
    "gpipe": "ScheduleGPipe",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}
_TORCH_DTYPES = {
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp32": "torch.float32",
    "fp8": "torch.bfloat16",
}

_STAGE = '''
class Stage(nn.Module):
    """Some layers of the model; the first stage embeds, the last has norm and head."""

    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(0)  # all ranks of a stage start from equal weights; load a checkpoint's here instead
        with torch.device("meta"):  # only this stage's layers are ever allocated
            self.model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
        decoder = self.model.get_decoder()
        last = layers[-1] == len(decoder.layers) - 1
        decoder.layers = nn.ModuleList(decoder.layers[i] for i in layers)
        if getattr(decoder.config, "layer_types", None):
            decoder.config.layer_types = [decoder.config.layer_types[i] for i in layers]
        if layers[0] > 0:
            decoder.embed_tokens = None
        if not last:
            decoder.norm, self.model.lm_head = nn.Identity(), nn.Identity()
        self.model.to_empty(device="cpu").apply(self.model._init_weights)

    def forward(self, x):
        given = {"inputs_embeds": x} if x.is_floating_point() else {"input_ids": x}
POSITIONS        with torch.autocast(device, DTYPE, enabled=AUTOCAST):
            return self.model.lm_head(self.model.get_decoder()(**given, use_cache=False).last_hidden_state)

'''

_MODEL = """
torch.manual_seed(0)  # all ranks start from equal weights; from_pretrained loads real ones
model = AutoModelForCausalLM.from_config(config)
"""

_CONTEXT = [
    'replace_attention(ContextAttention(mesh["cp"]))  # ring attention; every rank has a chunk from either end',
    'whole = {"input_ids": torch.zeros(1, SEQ, dtype=torch.long, device=device)}',
    'positions = shard_batch(whole, mesh["cp"]).inputs["position_ids"]',
]

_DATA = '''
generator = torch.Generator(device).manual_seed(mesh["dp"].get_local_rank())


def batch(sequences):
    """Random tokens, and for each the token that follows it."""
    tokens = torch.randint(config.vocab_size, (sequences, SEQ + 1), device=device, generator=generator)
    ids, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return ids, labels


def loss_of(logits, labels):
    return nn.functional.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


'''


_SHARDED = """    part = shard_batch({"input_ids": ids, "labels": labels}, mesh["cp"]).inputs
    return part["input_ids"], part["labels"]
"""


def _data(layout: Layout) -> str:
    return _DATA.replace("    return ids, labels\n", _SHARDED) if layout.cp > 1 else _DATA


def launch_line(layout: Layout, per_node: int, program: str) -> str:
    """The torchrun command that starts `program` on every rank; per_node: devices of a node."""
    world = layout.world_size
    if world <= per_node:
        return f"torchrun --standalone --nproc-per-node {world} {program}"
    nodes = world // per_node
    return f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-endpoint $HEAD_NODE:29500 {program}"


def train_line(layout: Layout, training: Training, per_node: int, model: str) -> str:
    """The command that runs the layout with `interlace train` for 20 steps and writes run.json.

    "" for what that trainer does not run: context or expert parallelism, selective recomputation, zero-bubble.
    """
    if layout.cp > 1 or layout.ep > 1 or layout.recompute == "selective" or layout.schedule == "zero_bubble":
        return ""
    options = {
        "model": shlex.quote(model),
        "dp": layout.dp,
        "tp": layout.tp,
        "pp": layout.pp,
        "cp": layout.cp,
        "ep": layout.ep,
        "interleave": layout.interleave,
        "zero": layout.zero,
        "microbatch": layout.microbatch,
        "global-batch": training.global_batch,
        "seq": training.seq,
        "dtype": training.dtype,
        "recompute": layout.recompute,
        "schedule": layout.schedule,
        "steps": 20,
        "out": "run.json",
    }
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    if layout.world_size <= per_node:
        return f"interlace train {words}"  # starts the processes of one machine itself
    return launch_line(layout, per_node, f"-m interlace.train {words}")


def training_snippet(
    layout: Layout,
    training: Training,
    layers: int,
    per_node: int = 8,
    config: Mapping[str, Any] | None = None,
) -> str:
    """Python source that trains on random tokens for three steps under the layout and prints the loss.

    It is started by `launch_line`. config: the Hugging Face config to write into the program; without it the program
    takes the config's folder (or config.json) as its argument. layers: of the model.
    With cp > 1 attention is the ring attention of interlace.context_parallel.
    """
    body = _staged(layout, training, layers) if layout.pp > 1 else _whole(layout, training)
    return _header(layout, training, per_node, config) + body + _FOOTER


_FOOTER = """    if dist.get_rank() == dist.get_world_size() - 1:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
dist.destroy_process_group()
"""


def not_in_program(layout: Layout) -> list[str]:
    """What the layout plans and the program does not do; its memory and time are then others than the plan's."""
    notes = []
    if layout.ep > 1:
        notes.append(
            f"Not in this program: experts over ep={layout.ep}; every rank holds its share of all of them."
        )
    return notes


def _imports(layout: Layout, argument: bool) -> list[str]:
    lines = ["import torch", "import torch.distributed as dist", "from torch import nn"]
    lines.append("from torch.distributed.device_mesh import init_device_mesh")
    if layout.zero:
        lines.append("from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard")
    if layout.pp > 1:
        lines.append(
            f"from torch.distributed.pipelining import PipelineStage, {_SCHEDULE_CLASS[layout.schedule]}"
        )
    standard = ["import copy"] * (layout.pp > 1) + ["import sys"] * argument
    lines = [*standard, *([""] if standard else []), *lines]
    lines += ["from transformers import AutoConfig, AutoModelForCausalLM", "", "import interlace"]
    if layout.cp > 1:
        lines.append(
            "from interlace.context_parallel import ContextAttention, replace_attention, shard_batch"
        )
    return [*lines, ""]


def _config_line(config: Mapping[str, Any] | None) -> str:
    if config is None:
        return "config = AutoConfig.from_pretrained(sys.argv[1])"
    fields = {"model_type": config["model_type"], **config}
    body = "".join(f"    {name}={value!r},\n" for name, value in fields.items() if name.isidentifier())
    return f"config = AutoConfig.for_model(\n{body})"


def _header(layout: Layout, training: Training, per_node: int, config: Mapping[str, Any] | None) -> str:
    order = [axis.name for axis in layout.placement] or ["pp", "dp", "cp", "tp"]
    sizes = ", ".join(str(getattr(layout, name)) for name in order)
    names = ", ".join(f'"{name}"' for name in order)
    lines = [
        f'"""{layout.name}, ZeRO-{layout.zero}. Start it with:',
        f"{launch_line(layout, per_node, 'layout.py' if config else 'layout.py CONFIG')}",
        *not_in_program(layout),
        '"""',
        "",
        *_imports(layout, config is None),
        f"MICROBATCH, MICROBATCHES, SEQ, STEPS = {layout.microbatch}, {layout.microbatches}, {training.seq}, 3",
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        f"mesh = init_device_mesh(device, ({sizes}), mesh_dim_names=({names}))",
        _config_line(config),
        *(_CONTEXT if layout.cp > 1 else []),
        "",
    ]
    return "\n".join(lines)


def _prepare(layout: Layout, training: Training, name: str, decoder: str) -> list[str]:
    """Lines that parallelize, recompute and shard the module called `name`."""
    lines = []
    if layout.tp > 1:
        sequence = ", sequence_parallel=True" if layout.sequence_parallel else ""
        lines.append(f'interlace.parallelize({name}, mesh["tp"]{sequence})')
    if layout.recompute == "full":
        lines.append(f"{name}.gradient_checkpointing_enable()")
        lines.append(f"{name}.train()")
    lines.append(f"{name}.to(device)")
    if layout.zero:
        dtype = _TORCH_DTYPES[training.dtype]
        options = f"mesh=data, mp_policy=policy, reshard_after_forward={layout.zero == 3}"
        lines += [
            'data = mesh["dp", "cp"]._flatten("data")' if layout.cp > 1 else 'data = mesh["dp"]',
            f"policy = MixedPrecisionPolicy(param_dtype={dtype}, reduce_dtype=torch.float32)",
            f"for layer in {decoder}.layers:",
            f"    fully_shard(layer, {options})",
            f"fully_shard({name}, {options})",
        ]
    elif layout.dp * layout.cp > 1:
        lines.append('data = mesh["dp", "cp"]._flatten("data")' if layout.cp > 1 else 'data = mesh["dp"]')
        lines.append(f"{name} = nn.parallel.DistributedDataParallel({name}, process_group=data.get_group())")
    return lines


def _whole(layout: Layout, training: Training) -> str:
    lines = _prepare(layout, training, "model", "model.get_decoder()")
    text = _MODEL + "\n".join(lines) + "\n"
    text += "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n" + _data(layout)
    inner = ["ids, labels = batch(MICROBATCH)"]
    call = "model(input_ids=ids, use_cache=False)"
    if layout.cp > 1:
        call = "model(input_ids=ids, position_ids=positions, use_cache=False)"
    if layout.zero in (1, 2):
        # ZeRO-1 keeps whole sums until the last microbatch; ZeRO-2 and 3 scatter them after each
        wanted = "number == MICROBATCHES - 1" if layout.zero == 1 else "True"
        inner.append(f"model.set_requires_gradient_sync({wanted})")
    compute = [f"loss = loss_of({call}.logits, labels)", "(loss / MICROBATCHES).backward()"]
    if not layout.zero and training.dtype != "fp32":
        # plain fp32 parameters, their fp32 gradients and moments: the 16 bytes per parameter of mixed precision
        compute[0:1] = [
            f"with torch.autocast(device, {_TORCH_DTYPES[training.dtype]}):",
            f"    {compute[0]}",
        ]
    loop = ["for step in range(STEPS):", "    for number in range(MICROBATCHES):"]
    loop += [f"        {line}" for line in (*inner, *compute)]
    loop += ["    optimizer.step()", "    optimizer.zero_grad()"]
    return text + "\n".join(loop) + "\n"


def _staged(layout: Layout, training: Training, layers: int) -> str:
    chunks = stage_layers(layers, layout.pp * layout.interleave)
    parts = ", ".join(f"range({part[0]}, {part[-1] + 1})" for part in chunks)
    several = layout.interleave > 1 or layout.schedule == "zero_bubble"
    body = ["stage = Stage(list(PARTS[number]))"]
    body += _prepare(layout, training, "stage.model", "stage.model.get_decoder()")
    if layout.zero:
        body = [line for line in body if not line.startswith("fully_shard(stage.model,")]
        body.append("fully_shard(stage, mesh=data, mp_policy=policy, reshard_after_forward=False)")
    body = [line.replace("stage.model = nn.parallel", "stage = nn.parallel") for line in body]
    body = [
        line.replace("DistributedDataParallel(stage.model,", "DistributedDataParallel(stage,")
        for line in body
    ]
    body.append(
        'stages.append(PipelineStage(stage, number, len(PARTS), torch.device(device), group=mesh["pp"].get_group()))'
    )
    given = "stages" if several else "stages[0]"
    run = [
        f"schedule = {_SCHEDULE_CLASS[layout.schedule]}({given}, MICROBATCHES, loss_fn=loss_of)",
        "optimizer = torch.optim.AdamW([p for stage in stages for p in stage.submod.parameters()], lr=1e-4)",
        "",
        "for step in range(STEPS):",
        "    ids, labels = batch(MICROBATCH * MICROBATCHES)",
    ]
    return (
        f"PARTS = [{parts}]\n\n"
        + _STAGE.replace("POSITIONS", '        given["position_ids"] = positions\n' if layout.cp > 1 else "")
        .replace("DTYPE", _TORCH_DTYPES[training.dtype])
        .replace("AUTOCAST", str(not layout.zero and training.dtype != "fp32"))
        + "".join(f"\n{line}" for line in body if line.startswith(("data =", "policy =")))
        + '\nstages = []\nfor number in range(mesh.get_local_rank("pp"), len(PARTS), mesh["pp"].size()):\n'
        + "".join(f"    {line}\n" for line in body if not line.startswith(("data =", "policy =")))
        + _data(layout)
        + "\n".join([*run, *_schedule_step()])
        + "\n"
    )


def _schedule_step() -> list[str]:
    first = 'mesh.get_local_rank("pp") == 0'
    last = 'mesh.get_local_rank("pp") == mesh["pp"].size() - 1'
    return [
        f"    given, losses = (ids,) if {first} else (), []",
        f"    target = labels if {last} else None",
        "    schedule.step(*given, target=target, losses=losses)",
        "    optimizer.step()",
        "    optimizer.zero_grad()",
        '    loss = torch.stack(losses).mean() if losses else torch.tensor(float("nan"))',
    ]


def serving_snippet(layout: Layout, per_node: int = 8, config: Mapping[str, Any] | None = None) -> str:
    """Python source that generates with the tensor-parallel ranks of one replica; each replica is its own launch."""
    one = Layout(1, layout.tp, layout.pp, 1)
    lines = [
        f'"""A replica of tp{layout.tp}; there are {layout.dp}. Start each with:',
        launch_line(one, per_node, "serve.py" if config else "serve.py CONFIG"),
        *([f"Not in this program: the {layout.pp} stages of the plan."] if layout.pp > 1 else []),
        '"""',
        "",
        *([] if config else ["import sys", ""]),
        "import torch",
        "import torch.distributed as dist",
        "from torch.distributed.device_mesh import init_device_mesh",
        "from transformers import AutoConfig, AutoModelForCausalLM",
        "",
        "import interlace",
        "",
        'device = "cuda" if torch.cuda.is_available() else "cpu"',
        f'mesh = init_device_mesh(device, ({layout.tp},), mesh_dim_names=("tp",))',
        _config_line(config),
        "torch.manual_seed(0)  # all ranks hold equal weights; from_pretrained loads real ones",
        "model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()",
        'model = interlace.parallelize(model, mesh["tp"]).to(device)',
        "ids = torch.arange(16, device=device)[None] % config.vocab_size",
        "out = model.generate(ids, max_new_tokens=8, do_sample=False)",
        "if dist.get_rank() == 0:",
        "    print(out[0, 16:].tolist())",
        "dist.destroy_process_group()",
    ]
    return "\n".join(lines) + "\n"
