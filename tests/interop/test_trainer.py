"""transformers' Trainer on a split model whose group is all ranks: every rank sees the same data."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from interlace.parallelize import parallelize
from tests.distributed import run_distributed
from tests.interop.models import assert_parameters_near, ids, llama
from tests.parallelize.models import assert_near

pytest.importorskip("accelerate")


def _losses(model: nn.Module, folder: str) -> list[float]:
    import transformers

    class Losses(transformers.TrainerCallback):
        def on_log(self, args: object, state: object, control: object, logs: dict, **kwargs: object) -> None:
            if "loss" in logs:
                found.append(logs["loss"])

    found: list[float] = []
    data = [{"input_ids": row, "labels": row} for row in ids(batch=6)]
    arguments = transformers.TrainingArguments(
        output_dir=folder, max_steps=3, per_device_train_batch_size=2, logging_steps=1, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, learning_rate=0.01, seed=5, max_grad_norm=0.5,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Losses()])
    trainer.train()
    return found


def _trained(rank: int, world_size: int, folder: str) -> None:
    whole = llama(4, 1, num_hidden_layers=1)
    split = parallelize(copy.deepcopy(whole), None)
    expected, found = _losses(whole, folder), _losses(split, folder)
    assert len(found) == 3
    assert_near("losses", torch.tensor(found), torch.tensor(expected))
    assert_parameters_near("three steps", split, whole, rank, grads=False)


def test_three_steps_of_the_trainer_equal_the_unsplit_model(tmp_path: Path) -> None:
    """Clipping included: the norm of all gradients is over shards of all ranks and counts replicas once."""
    run_distributed(2, _trained, str(tmp_path), timeout=120.0)
