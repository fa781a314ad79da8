"""Parameter counts of public models, to the parameter, and the active counts of mixtures of experts."""

from __future__ import annotations

import pytest

from interlace.planner.architecture import config_names, read_architecture
from interlace.planner.model import count_parameters, parameters

# Elements of the published checkpoints of each model (shared tensors once).
TOTAL = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-34b": 33_743_970_304,
    "tinyllama-1.1b": 1_100_048_384,
    "yi-6b": 6_061_035_520,
    "yi-34b": 34_388_917_248,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-123b": 122_610_069_504,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-70m": 70_426_624,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
    "gpt-j-6b": 6_050_882_784,
    "phi-1.5": 1_418_270_720,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "falcon-7b": 6_921_720_704,
    "falcon-40b": 41_303_293_952,
    "falcon-180b": 178_557_088_768,
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "bert-base-mlm": 109_514_298,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "xlm-roberta-base": 278_295_186,
    "distilbert-base": 66_985_530,
    "vit-base-16": 86_567_656,
    "vit-large-16": 304_326_632,
    "vit-huge-14": 632_045_800,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "flan-t5-small": 76_961_152,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "whisper-tiny": 37_760_640,
    "whisper-base": 72_593_920,
    "whisper-small": 241_734_912,
    "whisper-medium": 763_857_920,
    "whisper-large-v2": 1_543_304_960,
    "whisper-large-v3": 1_543_490_560,
    "whisper-large-v3-turbo": 808_878_080,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "starcoder-15b": 15_517_456_384,
    "olmo-7b": 6_888_095_744,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmoe-1b-7b": 6_919_161_856,
    "command-r": 34_980_831_232,
    "command-r-plus": 103_810_674_688,
    "stablelm-2-1.6b": 1_644_515_328,
}

# Active billions per token as the model's card states them, and whether that counts the token table.
ACTIVE = {
    "mixtral-8x7b": (12.9, True),
    "mixtral-8x22b": (39.0, True),
    "qwen1.5-moe-a2.7b": (2.7, True),
    "qwen2-57b-a14b": (14.0, True),
    "qwen3-30b-a3b": (3.3, True),
    "qwen3-235b-a22b": (22.0, True),
    "olmoe-1b-7b": (1.3, True),
    "deepseek-v2-lite": (2.4, False),
    "deepseek-v2": (21.0, False),
    "deepseek-v3": (37.0, False),
    "gpt-oss-20b": (3.61, False),
    "gpt-oss-120b": (5.13, False),
}


@pytest.mark.parametrize("name", TOTAL)
def test_the_count_is_the_published_one(name: str) -> None:
    """A wrong default of a family (tie, bias, norm) is off by whole matrices or vectors."""
    assert count_parameters(name)[0] == TOTAL[name]


def test_the_two_counts_of_the_mixtral_card() -> None:
    """Total and active to the parameter."""
    assert count_parameters("mixtral-8x7b") == (46_702_792_704, 12_879_925_248)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_of_the_card(name: str) -> None:
    """Cards round, so the bound is 3 %; counting the token table or not is more than that for small models."""
    billions, with_table = ACTIVE[name]
    counted = parameters(name)
    active = counted.active - (0 if with_table else counted.embedding)
    assert active / 1e9 == pytest.approx(billions, rel=0.03)


def test_every_shipped_config_is_read() -> None:
    """Names can be given instead of a path, in any case of letters."""
    for name in config_names():
        assert parameters(name).total > 0
    assert read_architecture("Llama-3.1-8B") == read_architecture("llama-3.1-8b")
