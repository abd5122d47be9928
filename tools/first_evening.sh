#!/usr/bin/env bash
# The first evening as a newcomer has it, on a CPU: bash tools/first_evening.sh [MODEL] [CARD] [FOLDER]
# `plan` from a bare venv, with chats in ShareGPT's form; then, in an empty HOME, `launch/run.sh install trl`, a tiny random
# model of the same type, and one trained step by `launch/run.sh trl`. Of the emitted files only what a CPU lacks is swapped:
# the weights, Liger's Triton kernels, and how long it runs. Downloads about 300 MB; torch is the CPU's local wheel where
# one is provided (its version is installed first, or pip would fetch CUDA's).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
model=${1:-llama 3.1 8b} card=${2:-RTX 3060 12GB} folder=${3:-$(mktemp -d)}
torch=$(sed -n 's/^torch==//p' "$root/constraints.txt")
for name in $(compgen -e); do
    case $name in XDG_* | HF_* | HUGGINGFACE_* | TRANSFORMERS_* | TORCH* | PYTHON* | VIRTUAL_ENV) unset "$name" ;; esac
done
mkdir -p "$folder/home" && cd "$folder"
export HOME="$folder/home" HF_HUB_OFFLINE=1 CUDA_VISIBLE_DEVICES="" PIP_NO_COMPILE=1 PIP_QUIET=1
SECONDS=0 before=0
took() { echo "== $((SECONDS - before)) s: $1" && before=$SECONDS; }

python3 -m venv plan-venv
plan-venv/bin/pip install "$root"
took "plan installed in a bare venv"

python3 - <<'PY'
import json
facts = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}
rows = [
    {"conversations": [{"from": "human", "value": f"{ask} of {land}?"}, {"from": "gpt", "value": f"It is {town}."}]}
    for land, town in facts.items()
    for ask in ("What is the capital", "Name the capital", "Which town is the capital")
]
json.dump(rows, open("chats.json", "w"))
PY
plan-venv/bin/plan "$model" --gpu "$card" --dataset chats.json --out evening
took "planned"

cd evening
python3 -m venv .venv-trl
.venv-trl/bin/pip install "torch==$torch"
took "torch $torch"
bash launch/run.sh install trl
took "launch/run.sh install trl"

type=$(sed -n 's/.*"model_type": "\([^"]*\)".*/\1/p' plan.json | head -1)
.venv-trl/bin/python - "$type" <<'PY'
import json, sys
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

made = Tokenizer(models.BPE())
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
said = [turn["value"] for row in json.load(open("../chats.json")) for turn in row["conversations"]]
words = {"special_tokens": ["<pad>", "<end>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False, **words)
made.train_from_iterator([*said, "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"] * 9, trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
tokenizer.save_pretrained("tiny")
small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
small |= {"num_key_value_heads": 1, "vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 1}
config = AutoConfig.for_model(sys.argv[1], **small, bos_token_id=None)
torch.manual_seed(0)
AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained("tiny")
PY
sed -i 's|^MODEL = "[^"]*"|MODEL = "./tiny"|' launch/prepare_data.py
sed -i -e 's|^model_name_or_path: .*|model_name_or_path: ./tiny|' -e 's|^use_liger_kernel: true|use_liger_kernel: false|' \
    -e 's|^num_train_epochs: .*|max_steps: 1\nuse_cpu: true|' launch/trl/trl-sft.yaml
HF_TOKEN=of-nobody bash launch/run.sh trl
took "launch/run.sh trl: one step"

.venv-trl/bin/python - <<'PY'
import json, math
state = json.load(open("outputs/checkpoint-1/trainer_state.json"))
(loss,) = [row["loss"] for row in state["log_history"] if "loss" in row]
assert state["global_step"] == 1 and math.isfinite(loss) and loss > 0, state
print(f"one step trained: loss {loss:.3f}; adapters in outputs/")
PY
test -s outputs/adapter_model.safetensors
echo "== $SECONDS s in all, $(du -sm .venv-trl | cut -f1) MB installed, in $folder"
