"""Traces programs that nobody here wrote, and writes a table: traced or refused, time, peak.

    python -m benchmarks.trace_programs CHECKOUTS [NAME ...] [--python PYTHON]

CHECKOUTS holds one directory per repository, owner+name, as cloned (the table's commits); `trl` needs none, its scripts
come with the package. The programs are read and run, never copied: the table says repository, commit, path and command.
MODELS stands for a folder of this run with a `config.json` per model that the catalogue does not have. LLaMA-Factory,
Axolotl and Unsloth run in environments of their own (--python).
Results: benchmarks/data/trace_programs.json, by name; rows of programs that were not named stay.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "data" / "trace_programs.json"
GPU = "rtx-4090"
OUTPUT = "--output_dir OUT --report_to none --max_steps 2"
QWEN = "Qwen/Qwen2.5-0.5B"
MODEL = f"--model_name_or_path {QWEN}"
LORA = "--use_peft --lora_r 16 --lora_target_modules all-linear"
PEFT = "huggingface+peft"
SCRATCH = "rasbt+LLMs-from-scratch"
TRANSFORMERS = "macorisd+transformers-qwen3"  # transformers' own examples, in a fork
ST = "huggingface+sentence-transformers"
ST_FOLDER = "examples/sentence_transformer/training"
FACTORY = "hiyouga+LLaMA-Factory"
NOTEBOOKS = "unslothai+notebooks"
AXOLOTL = "axolotl-ai-cloud+axolotl"
MINIMIND = "jingyaogong+minimind"
CONFIGS = {  # each class's defaults are the published model's, but for what stands here
    "bert-base-uncased": {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
    "distilbert-base-uncased": {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]},
    "t5-small": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0},
    "roberta-base": {
        "model_type": "roberta",
        "architectures": ["RobertaForMaskedLM"],
        "max_position_embeddings": 514,
        "type_vocab_size": 1,
        "vocab_size": 50265,
    },
    "llava-1.5-7b-hf": {  # llava-hf/llava-1.5-7b-hf: the class's vision encoder, and Vicuna 7B
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096},
        "dtype": "float16",
    },
    "Qwen2.5-VL-3B-Instruct": {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 2048,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "intermediate_size": 11008,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {"intermediate_size": 3420, "hidden_size": 1280, "out_hidden_size": 2048},
    },
    "Qwen3-VL-4B-Instruct": {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 9728,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        },
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2560,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
}

PROGRAMS = {
    # name: (repository, directory in it, command)
    "trl-sft-full": ("trl", "", f"trl sft {MODEL} --dataset_name trl-lib/Capybara {OUTPUT}"),
    "trl-sft-lora": ("trl", "", f"trl sft {MODEL} --dataset_name trl-lib/Capybara {LORA} {OUTPUT}"),
    "trl-dpo": (
        "trl",
        "",
        f"trl dpo {MODEL} --dataset_name trl-lib/ultrafeedback_binarized {OUTPUT}",
    ),
    "trl-dpo-lora": (
        "trl",
        "",
        f"trl dpo {MODEL} --dataset_name trl-lib/ultrafeedback_binarized {LORA} {OUTPUT}",
    ),
    "trl-kto": ("trl", "", f"trl kto {MODEL} --dataset_name trl-lib/kto-mix-14k {OUTPUT}"),
    "trl-reward": (
        "trl",
        "",
        f"trl reward {MODEL} --dataset_name trl-lib/ultrafeedback_binarized --max_length 8192 "
        f"--per_device_train_batch_size 1 {OUTPUT}",  # TRL drops what is longer than its maximum instead of cutting it
    ),
    "trl-grpo": (
        "trl",
        "",
        f"trl grpo {MODEL} --dataset_name trl-lib/DeepMath-103K --reward_funcs accuracy_reward {OUTPUT}",
    ),
    "trl-rloo": (
        "trl",
        "",
        f"trl rloo {MODEL} --dataset_name trl-lib/DeepMath-103K --reward_funcs accuracy_reward {OUTPUT}",
    ),
    "trl-orpo": (
        "huggingface+trl",
        "",
        f"python examples/scripts/orpo.py {MODEL} --dataset_name trl-lib/ultrafeedback_binarized "
        f"--per_device_train_batch_size 2 --gradient_accumulation_steps 1 {OUTPUT}",
    ),
    "trl-sft-vlm": (
        "huggingface+trl",
        "",
        "python examples/scripts/sft_vlm.py --model_name_or_path MODELS/llava-1.5-7b-hf --dataset_name "
        "HuggingFaceH4/llava-instruct-mix-vsft --per_device_train_batch_size 1 --gradient_accumulation_steps 1 "
        f"--dtype bfloat16 --use_peft --lora_target_modules all-linear {OUTPUT}",
    ),
    "trl-cpo": (
        "huggingface+trl",
        "",
        "python examples/scripts/cpo.py --dataset_name trl-lib/ultrafeedback_binarized --model_name_or_path "
        f"openai-community/gpt2 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 {OUTPUT}",
    ),
    "trl-prm": (
        "huggingface+trl",
        "",
        "python examples/scripts/prm.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name trl-lib/prm800k "
        f"--per_device_train_batch_size 8 {OUTPUT}",
    ),
    "trl-gkd": (
        "huggingface+trl",
        "",
        "python examples/scripts/gkd.py --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --teacher_model_name_or_path "
        "Qwen/Qwen2.5-1.5B-Instruct --dataset_name trl-lib/chatbot_arena_completions --per_device_train_batch_size 4 "
        f"--gradient_accumulation_steps 8 {OUTPUT}",
    ),
    "trl-ppo": (
        "huggingface+trl",
        "",
        "python examples/scripts/ppo/ppo.py --dataset_name trl-internal-testing/descriptiveness-sentiment-trl-style "
        "--dataset_train_split descriptiveness --output_dir OUT --per_device_train_batch_size 64 "
        "--gradient_accumulation_steps 1 --total_episodes 10000 --model_name_or_path EleutherAI/pythia-1b-deduped "
        "--missing_eos_penalty 1.0 --report_to none",
    ),
    "trl-sft-gemma3-vlm": (
        "huggingface+trl",
        "",
        "python examples/scripts/sft_vlm_gemma3.py --dataset_name HuggingFaceH4/llava-instruct-mix-vsft "
        "--model_name_or_path google/gemma-3-4b-it --per_device_train_batch_size 1 --dtype bfloat16 --use_peft "
        f"--lora_target_modules all-linear --attn_implementation eager {OUTPUT}",
    ),
    "trl-sft-qwen2.5-vl": (
        "huggingface+trl",
        "",
        "python examples/scripts/sft_vlm.py --dataset_name HuggingFaceH4/llava-instruct-mix-vsft --model_name_or_path "
        "MODELS/Qwen2.5-VL-3B-Instruct --per_device_train_batch_size 1 --gradient_accumulation_steps 1 "
        f"--dtype bfloat16 --use_peft --lora_target_modules all-linear {OUTPUT}",
    ),
    "trl-sft-qwen3-vl": (
        "huggingface+trl",
        "",
        "python examples/scripts/sft_vlm.py --dataset_name HuggingFaceH4/llava-instruct-mix-vsft --model_name_or_path "
        "MODELS/Qwen3-VL-4B-Instruct --per_device_train_batch_size 1 --gradient_accumulation_steps 1 "
        f"--dtype bfloat16 --use_peft --lora_target_modules all-linear {OUTPUT}",
    ),
    "transformers-mlm": (
        TRANSFORMERS,
        "examples/pytorch/language-modeling",
        "python run_mlm.py --model_name_or_path MODELS/roberta-base --dataset_name wikitext --dataset_config_name "
        "wikitext-2-raw-v1 --per_device_train_batch_size 8 --do_train --output_dir OUT",
    ),
    "transformers-summarization": (
        TRANSFORMERS,
        "examples/pytorch/summarization",
        "python run_summarization.py --model_name_or_path MODELS/t5-small --do_train --dataset_name cnn_dailymail "
        "--dataset_config 3.0.0 --source_prefix summarize: --output_dir OUT --per_device_train_batch_size=4",
    ),
    "minimind-pretrain": (
        MINIMIND,
        "trainer",
        "python train_pretrain.py --data_path MODELS/rows/text.jsonl --from_weight none --save_dir OUT",
    ),
    "minimind-sft": (
        MINIMIND,
        "trainer",
        "python train_full_sft.py --data_path MODELS/rows/conversations.jsonl --from_weight none --save_dir OUT",
    ),
    "minimind-dpo": (
        MINIMIND,
        "trainer",
        "python train_dpo.py --data_path MODELS/rows/pairs.jsonl --from_weight none --save_dir OUT",
    ),
    "fastchat-sft": (
        "lm-sys+FastChat",
        "",
        "python -m fastchat.train.train --model_name_or_path meta-llama/Llama-3.2-1B --data_path "
        "MODELS/rows/shared.json --bf16 True --output_dir OUT --per_device_train_batch_size 2 --model_max_length 2048 "
        "--gradient_checkpointing True --lazy_preprocess True --report_to none",
    ),
    "stanford-alpaca": (
        "tatsu-lab+stanford_alpaca",
        "",
        "python train.py --model_name_or_path Qwen/Qwen2.5-0.5B --data_path MODELS/rows/alpaca.json --bf16 True "
        "--output_dir OUT --per_device_train_batch_size 4 --report_to none",
    ),
    "open-r1-sft": (
        "huggingface+open-r1",
        "src",
        "python -m open_r1.sft --config ../recipes/OpenR1-Distill-7B/sft/config_distill.yaml --output_dir OUT "
        "--report_to none --push_to_hub false",
    ),
    "handbook-sft": (
        "huggingface+alignment-handbook",
        "",
        "python scripts/sft.py --config recipes/zephyr-7b-beta/sft/config_qlora.yaml --output_dir OUT --report_to none",
    ),
    "st-cross-encoder": (
        ST,
        "examples/cross_encoder/training/nli",
        "python training_nli.py MODELS/distilbert-base-uncased",
    ),
    "st-splade": (
        ST,
        "examples/sparse_encoder/training/nli",
        "python train_splade_nli.py",
    ),
    "transformers-clm": (
        TRANSFORMERS,
        "examples/pytorch/language-modeling",
        "python run_clm.py --model_name_or_path openai-community/gpt2 --dataset_name wikitext --dataset_config_name "
        "wikitext-2-raw-v1 --per_device_train_batch_size 8 --do_train --output_dir OUT",
    ),
    "transformers-glue": (
        TRANSFORMERS,
        "examples/pytorch/text-classification",
        "python run_glue.py --model_name_or_path MODELS/bert-base-uncased --task_name mrpc --do_train "
        "--max_seq_length 128 --per_device_train_batch_size 32 --output_dir OUT",
    ),
    "st-sts": (ST, f"{ST_FOLDER}/sts", "python training_stsbenchmark.py MODELS/distilbert-base-uncased"),
    "st-nli": (ST, f"{ST_FOLDER}/nli", "python training_nli_v2.py MODELS/distilbert-base-uncased"),
    "llamafactory-lora-sft": (
        FACTORY,
        "",
        "python -m llamafactory.cli train examples/train_lora/qwen3_lora_sft.yaml gradient_accumulation_steps=1",
    ),
    "llamafactory-lora-dpo": (
        FACTORY,
        "",
        "python -m llamafactory.cli train examples/train_lora/qwen3_lora_dpo.yaml gradient_accumulation_steps=1",
    ),
    "unsloth-llama3.1-8b": (NOTEBOOKS, "python_scripts", "python Llama3.1_(8B)-Alpaca.py"),
    "unsloth-mistral-7b": (NOTEBOOKS, "python_scripts", "python Mistral_v0.3_(7B)-Alpaca.py"),
    "axolotl-lora-1b": (
        AXOLOTL,
        "",
        "python -m axolotl.cli.train examples/llama-3/lora-1b.yml --attn_implementation=sdpa --sample_packing=False "
        "--eval_sample_packing=False",  # as the file stands Axolotl asks for flash-attn and ends
    ),
    "litgpt-lora": (
        "Lightning-AI+litgpt",
        "",
        "litgpt finetune_lora MODELS/litgpt --data JSON --data.json_path MODELS/litgpt/rows.json "
        "--data.val_split_fraction 0.1 --precision bf16-true --train.max_seq_length 2048 --out_dir OUT",
    ),
    "qlora-guanaco": (
        "artidoro+qlora",
        "",
        "python qlora.py --model_name_or_path huggyllama/llama-7b --output_dir OUT",
    ),
    "alpaca-lora": ("tloen+alpaca-lora", "", f"python finetune.py --base_model {QWEN} --output_dir OUT"),
    "nanogpt-gpt2": (
        "karpathy+nanoGPT",
        "",
        "python train.py --dataset=phantom --batch_size=12 --gradient_accumulation_steps=2 --eval_iters=1 "
        "--compile=False",
    ),
    "nanogpt-gpt2-compiled": (
        "karpathy+nanoGPT",
        "",
        "python train.py --dataset=phantom --batch_size=12 --gradient_accumulation_steps=2 --eval_iters=1",
    ),
    "nanogpt-char": (
        "karpathy+nanoGPT",
        "",
        "python train.py config/train_shakespeare_char.py --dataset=phantom --eval_iters=1 --compile=False",
    ),
    "peft-gralora": (
        PEFT,
        "examples/gralora_finetuning",
        f"python gralora_finetuning.py --base_model {QWEN} --output_dir OUT",
    ),
    "peft-hira": (PEFT, "examples/hira_finetuning", f"python hira_finetuning.py --base_model {QWEN} --output_dir OUT"),
    "peft-sft-qlora": (
        PEFT,
        "examples/sft",
        f"python train.py {MODEL} --dataset_name smangrul/ultrachat-10k-chatml --chat_template_format chatml "
        "--add_special_tokens False --append_concat_token False --splits train,test --max_length 2048 --bf16 True "
        "--use_peft_lora True --lora_r 8 --lora_target_modules all-linear --use_4bit_quantization True "
        "--use_nested_quant True --bnb_4bit_compute_dtype bfloat16 --per_device_train_batch_size 2 --output_dir OUT",
    ),
    "peft-dora": (
        PEFT,
        "examples/dora_finetuning",
        f"python dora_finetuning.py --base_model {QWEN} --data_path timdettmers/openassistant-guanaco --output_dir OUT",
    ),
    "peft-dora-quantized": (
        PEFT,
        "examples/dora_finetuning",
        f"python dora_finetuning.py --base_model {QWEN} --quantize --use_dora --data_path "
        "timdettmers/openassistant-guanaco --output_dir OUT",
    ),
    "peft-olora": (
        PEFT,
        "examples/olora_finetuning",
        f"python olora_finetuning.py --base_model {QWEN} --output_dir OUT",
    ),
    "peft-pissa": (
        PEFT,
        "examples/pissa_finetuning",
        f"python pissa_finetuning.py --base_model_name_or_path {QWEN} --init_lora_weights gaussian --dataset_split "
        "train --dataset_field instruction output --data_path fxmeng/alpaca --output_dir OUT",
    ),
    "peft-miss": (
        PEFT,
        "examples/miss_finetuning",
        f"python miss_finetuning.py --base_model_name_or_path {QWEN} --dataset_split train --dataset_field instruction "
        "output --data_path fxmeng/alpaca --output_dir OUT",
    ),
    "peft-lorafa": (
        PEFT,
        "examples/lorafa_finetune",
        f"python lorafa_finetuning.py --base_model_name_or_path {QWEN} --dataset_name_or_path fxmeng/alpaca "
        "--output_dir OUT",
    ),
    "peft-randlora": (
        PEFT,
        "examples/randlora_finetuning",
        f"python randlora_finetuning.py --base_model {QWEN} --data_path fxmeng/guanaco --output_dir OUT",
    ),
    "peft-road": (
        PEFT,
        "examples/road_finetuning",
        f"python road_finetuning.py --base_model {QWEN} --data_path fxmeng/guanaco --output_dir OUT",
    ),
    "peft-delora": (
        PEFT,
        "examples/delora_finetuning",
        f"python delora_finetuning.py --base_model {QWEN} --data_path fxmeng/guanaco --output_dir OUT",
    ),
    "peft-waveft": (
        PEFT,
        "examples/waveft_finetuning",
        f"python waveft_finetuning.py --base_model {QWEN} --data_path fxmeng/guanaco --output_dir OUT",
    ),
    "peft-classification": (
        PEFT,
        "examples/sequence_classification",
        "python peft_no_lora_accelerate.py --model_name_or_path MODELS/roberta-base --per_device_train_batch_size 8 "
        "--num_train_epochs 1 --output_dir OUT",
    ),
    "scratch-ch05": (SCRATCH, "ch05/01_main-chapter-code", "python gpt_train.py"),
    "scratch-ch06": (SCRATCH, "ch06/01_main-chapter-code", "python gpt_class_finetune.py --test_mode"),
    "scratch-ch07": (SCRATCH, "ch07/01_main-chapter-code", "python gpt_instruction_finetuning.py --test_mode"),
    "scratch-speed": (SCRATCH, "ch05/10_llm-training-speed", "python 00_orig.py"),
    "scratch-speed-opt": (SCRATCH, "ch05/10_llm-training-speed", "python 01_opt_single_gpu.py"),
}


def traced(checkouts: Path, python: str, name: str) -> dict[str, object]:
    """One row of the table."""
    repository, folder, text = PROGRAMS[name]
    where = checkouts / repository / folder if repository != "trl" else checkouts
    command = text.replace("OUT", f"/tmp/trace-programs/{name}").replace("MODELS", str(models())).split()
    if name.startswith("litgpt"):
        subprocess.run([python, "-c", _LITGPT, str(models() / "litgpt")], check=True)
    if name.startswith("nanogpt"):
        for part in ("train", "val"):
            path = where / "data" / "phantom" / f"{part}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(1 << 21))
    if rows := _ROWS.get(name.partition("-")[0]):
        path = (models() / "litgpt" if name.startswith("litgpt") else where) / rows
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([{"instruction": "a", "input": "", "output": "b" * 1700}] * 64))
    if name.startswith("unsloth"):
        command = ["python", text.removeprefix("python ")]
    source_paths = [
        str(checkouts / FACTORY / "src"),
        str(where / "src") if name.startswith("handbook") else "",
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, source_paths)]),
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
    }
    environment["VIRTUAL_ENV"] = str(Path(python).parent.parent)
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [python, "-c", "from finetune_planner.cli import main; main()", "trace", "--gpu", GPU, "--yes", "--json=full",
         "--time-limit", "600", "--seq-len", "2048", "--", *command],
        cwd=where, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    row: dict[str, object] = {
        "repository": repository.replace("+", "/"),
        "commit": _commit(where) if repository != "trl" else "installed package",
        "command": " ".join([*(["cd", folder, "&&"] if folder else []), text]),
        "date": time.strftime("%Y-%m-%d"),
        "exit_code": done.returncode,
        "wall_s": round(time.monotonic() - began),
        "cpu_s": round(spent.ru_utime + spent.ru_stime - used.ru_utime - used.ru_stime),
    }
    if done.stdout:
        answer = json.loads(done.stdout)
        row |= {
            "result": "traced",
            "gpu": answer["gpu"],
            "verdict": answer["verdict"],
            "peak_allocated_bytes": answer["peak_allocated_bytes"],
            "peak_reserved_bytes": answer["peak_reserved_bytes"],
            "num_steps": answer["num_steps"],
            "trace_s": round(answer["elapsed_s"]),
            "libraries": answer["libraries"],
        }
    else:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        row |= {"result": "not traced", "reason": errors[-1].removeprefix("error: ")[:300] if errors else "?"}
        Path(f"/tmp/trace-programs-{name}.log").write_text(done.stderr)
    return row


def models() -> Path:
    """The folder with a `config.json` per model."""
    folder = Path("/tmp/trace-programs/models")
    for name, config in CONFIGS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "rows").mkdir(exist_ok=True)
    for name, row in _OWN_ROWS.items():
        rows = [row] * 64
        text = json.dumps(rows) if name.endswith(".json") else "\n".join(map(json.dumps, rows))
        (folder / "rows" / name).write_text(text)
    return folder


_LONG = "b " * 4096
_TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _LONG}]
_OWN_ROWS = {
    "text.jsonl": {"text": _LONG},
    "conversations.jsonl": {"conversations": _TALK},
    "pairs.jsonl": {"chosen": _TALK, "rejected": _TALK},
    "alpaca.json": {"instruction": "a", "input": "", "output": _LONG},
    "shared.json": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": _LONG}]},
}
"""Rows of the program's user, who would have them in a file: MODELS/rows."""
_LITGPT = """
import json, sys, torch, yaml
from dataclasses import asdict
from pathlib import Path
from litgpt import Config
from tokenizers import Tokenizer, models, pre_tokenizers

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
(folder / "model_config.yaml").write_text(yaml.dump(asdict(Config.from_name("Llama-3.2-1B"))))
torch.save({}, folder / "lit_model.pth")
bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={one: index for index, one in enumerate(bytes_)}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.save(str(folder / "tokenizer.json"))
words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "!", "eos_token": "!"}
(folder / "tokenizer_config.json").write_text(json.dumps(words))
"""
"""What litgpt calls a checkpoint: its own configuration by name, no weights, a token of every byte."""
_ROWS = {"litgpt": "rows.json", "axolotl": "teknium/GPT4-LLM-Cleaned/rows.json", "scratch": "middlemarch.txt"}
"""Where a program looks for rows that are not a data set of the hub: with its checkpoint, and beside it."""


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Traces the programs that were named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    for name in arguments.names or PROGRAMS:
        row = traced(arguments.checkouts, arguments.python, name)
        table = json.loads(OUT.read_text()) if OUT.exists() else {}
        table[name] = row
        OUT.write_text(json.dumps(dict(sorted(table.items())), indent=1) + "\n")
        print(name, row["result"], row.get("reason", row.get("peak_allocated_bytes")), row["wall_s"], flush=True)


if __name__ == "__main__":
    main()
