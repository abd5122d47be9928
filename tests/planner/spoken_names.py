"""What people type for a model and for a card, and what they mean."""

SPOKEN = {
    "llama 3.1 8b": "meta-llama/Llama-3.1-8B", "Llama 3.1 8B Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1:8b": "meta-llama/Llama-3.1-8B", "llama-3-1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama 3.1 8B Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "meta-lama/Llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "https://huggingface.co/meta-llama/Llama-3.1-8B/tree/main": "meta-llama/Llama-3.1-8B",
    "lama 3.1 8b": "meta-llama/Llama-3.1-8B", "llama 3 8 billion": "meta-llama/Meta-Llama-3-8B",
    "llama2-7b": "meta-llama/Llama-2-7b-hf", "llama3.2:1b": "meta-llama/Llama-3.2-1B",
    "llama 3.3 70b": "meta-llama/Llama-3.3-70B-Instruct", "qwen3 8b": "Qwen/Qwen3-8B",
    "Qwen 3 8B Base": "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-32B-Base": "Qwen/Qwen3-32B",
    "qwen2.5-coder:7b": "Qwen/Qwen2.5-Coder-7B", "qwen 2.5 0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen3 30b": "Qwen/Qwen3-30B-A3B", "mistral 7b": "mistralai/Mistral-7B-v0.3",
    "mistral-7b": "mistralai/Mistral-7B-v0.3", "mistral 7b v0.1": "mistralai/Mistral-7B-v0.1",
    "mistral 7b instruct": "mistralai/Mistral-7B-Instruct-v0.3", "mistral nemo 12b": "mistralai/Mistral-Nemo-Base-2407",
    "mixtral 8x7b": "mistralai/Mixtral-8x7B-v0.1", "tiny llama 1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "code llama 7b": "codellama/CodeLlama-7b-hf", "gemma2:9b": "google/gemma-2-9b",
    "google gemma 3 4b": "google/gemma-3-4b-it", "gemma 3 4b base": "google/gemma-3-4b-pt", "phi 4": "microsoft/phi-4",
    "phi4 mini": "microsoft/Phi-4-mini-instruct", "gpt 2": "openai-community/gpt2", "gptj 6b": "EleutherAI/gpt-j-6b",
    "gpt-oss:20b": "openai/gpt-oss-20b", "olmo2 7b": "allenai/OLMo-2-1124-7B",
    "smol lm 2 135m": "HuggingFaceTB/SmolLM2-135M",
    "deepseek r1 distill llama 8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "falcon3 7b": "tiiuae/Falcon3-7B-Base",
    "bloom 1.1b": "bigscience/bloom-1b1", "vicuna 7b": "lmsys/vicuna-7b-v1.5",
    "whisper large v3": "openai/whisper-large-v3", "unsloth/Meta-Llama-3.1-8B": "unsloth/Meta-Llama-3.1-8B",
    "someone/Qwen3-4B": "someone/Qwen3-4B", "llama3.1:8b-instruct-q4_K_M": "meta-llama/Llama-3.1-8B-Instruct",
    "TheBloke/Llama-2-7B-GGUF": "meta-llama/Llama-2-7b-hf", "hf.co/unsloth/Qwen3-8B-GGUF:UD-Q4_K_XL": "Qwen/Qwen3-8B",
    "/home/me/Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf": "meta-llama/Llama-3.1-8B-Instruct",
    "mlx-community/Llama-3.2-3B-Instruct-4bit": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.2:3b-instruct-fp16": "meta-llama/Llama-3.2-3B-Instruct", "gemma3:4b-it-qat": "google/gemma-3-4b-it",
}  # fmt: skip
"""What is typed -> the hub id that a launch file names."""

CARDS = {
    "RTX 3060 12GB": ("rtx-3060", None), "GeForce RTX 3060 Ti": ("rtx-3060-ti", None), "3080 ti": ("rtx-3080-ti", None),
    "RTX 3080 12 GB": ("rtx-3080-12gb", None), "2 x RTX 3090": ("rtx-3090", 2), "rtx 4060": ("rtx-4060", None),
    "4060 Ti 16GB": ("rtx-4060-ti-16gb", None), "4070 Ti": ("rtx-4070-ti", None),
    "RTX 4070 Ti Super": ("rtx-4070-ti-super", None), "RTX 4080 SUPER 16GB": ("rtx-4080-super", None),
    "4x4090": ("rtx-4090", 4), "RTX 4090 Laptop GPU": ("rtx-4090-laptop", None),
    "RTX 4070 mobile": ("rtx-4070-laptop", None), "5080 laptop": ("rtx-5080-laptop", None),
    "NVIDIA GeForce RTX 5090 32GB": ("rtx-5090", None), "Quadro RTX 8000": ("quadro-rtx-8000", None),
    "Quadro RTX A6000": ("rtx-a6000", None), "RTX A2000 12GB": ("rtx-a2000-12gb", None),
    "RTX 4000 Ada": ("rtx-4000-ada", None), "RTX PRO 5000 72GB": ("rtx-pro-5000-blackwell-72gb", None),
    "RTX PRO 6000": ("rtx-pro-6000-blackwell", None), "L40S 48GB": ("l40s", None), "A10": ("a10", None),
    "a2": ("a2", None), "2xT4": ("t4", 2), "A100 40GB": ("a100-40gb", None), "H100": ("h100-sxm", None),
    "8xH100": ("h100-sxm", 8), "8 x H100 80GB": ("h100-sxm", 8), "H100:4": ("h100-sxm", 4),
    "H100 94GB": ("h100-nvl", None), "GH200": ("gh200", None), "B200 192GB": ("b200", None), "MI300": ("mi300x", None),
    "MI100": ("mi100", None), "7900 XTX": ("rx-7900-xtx", None), "Radeon RX 9070 XT": ("rx-9070-xt", None),
    "Strix Halo 128GB": ("radeon-8060s-128gb", None), "Intel Arc B580 12GB": ("arc-b580", None),
    "M4": ("apple-m4", None), "MacBook Pro M4 Max 64GB": ("apple-m4-max-64gb", None), "mac m2": ("apple-m2", None),
    "Jetson AGX Orin": ("jetson-agx-orin-64gb", None), "Jetson Thor": ("jetson-agx-thor", None),
    "GTX 1660:6GiB:192GB/s:10TFLOPS:sm75": ("GTX 1660:6GiB:192GB/s:10TFLOPS:sm75", None),
    "2x Some card:12GiB:0.36TB/s:29 TFLOPS": ("Some card:12GiB:360GB/s:29TFLOPS", 2),
}  # fmt: skip
"""What is typed -> the card's key, and how many."""
FAMILIES = ("H100", "8xH100", "8 x H100 80GB", "H100:4", "H100 94GB", "MI300", "Jetson AGX Orin")
"""Those of which one is by far the usual: it is taken, and said."""
