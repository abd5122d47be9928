"""The tools of `plan mcp`: each is one command, its schema its signature."""

from typing import Annotated, Any

from pydantic import Field

from finetune_planner.cli.agent_desk import Desk, refusal

Model = Annotated[str, Field(description="hub id, what people call it ('llama 3.1 8b'), or a folder")]
Gpu = Annotated[str, Field(description="'RTX 3060 12GB', '8xH100', 'local', or NAME:12GiB:360GB/s:29TFLOPS")]
Method = Annotated[str | None, Field(description="full, lora or qlora")]
Tokens = Annotated[int | None, Field(description="tokens per sequence; default 2048", ge=1)]
Count = Annotated[int | None, Field(ge=1)]


def words_of(**settings: Any) -> list[str]:
    """Options of the command line: `seq_len=2048` is `--seq-len=2048`, True a flag, None nothing."""
    said = {name.replace("_", "-"): value for name, value in settings.items() if value is not None}
    return [
        (f"--{name}" if value else f"--no-{name}") if isinstance(value, bool) else f"--{name}={value}"
        for name, value in said.items()
    ]


class Tools:
    """What an agent may ask, at one desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def plan(
        self,
        model: Model,
        gpu: Gpu,
        seq_len: Tokens = None,
        global_batch: Annotated[int | None, Field(description="sequences per optimizer step", ge=1)] = None,
        method: Method = None,
        objective: Annotated[str | None, Field(description="sft, pretrain, dpo, kto, grpo, reward, ...")] = None,
        dataset: Annotated[str | None, Field(description="file of samples, or hub id")] = None,
        target: Annotated[str | None, Field(description="trl, hf, axolotl, llamafactory, unsloth, ...")] = None,
        out: Annotated[str | None, Field(description="new folder for launch files and reports")] = None,
    ) -> dict[str, Any]:
        """The fastest fine-tuning setup that fits a GPU: verdict, setup, memory, speed, and why not another one."""
        data = None if dataset is None else self._desk.name(dataset)
        folder = None if out is None else self._desk.path(out)
        more = words_of(seq_len=seq_len, global_batch=global_batch, method=method, objective=objective)
        more += words_of(gpu=gpu, dataset=data, target=target, out=folder)
        return self._desk.ask("make", self._desk.name(model), *more)

    def estimate(
        self,
        model: Model,
        gpu: Gpu,
        method: Method = None,
        seq_len: Tokens = None,
        micro_batch: Annotated[int | None, Field(description="per_device_train_batch_size", ge=1)] = None,
        accumulation: Annotated[int | None, Field(description="gradient_accumulation_steps", ge=1)] = None,
        rank: Annotated[int | None, Field(description="lora_r", ge=1)] = None,
        quantization: Annotated[str | None, Field(description="none, int8, nf4 or nf4-double")] = None,
        checkpointing: Annotated[bool | None, Field(description="gradient_checkpointing")] = None,
        optimizer: Annotated[str | None, Field(description="adamw, adamw-8bit, paged-adamw-8bit, ...")] = None,
        attention: Annotated[str | None, Field(description="eager, sdpa or flash-attention-2")] = None,
        num_gpus: Count = None,
    ) -> dict[str, Any]:
        """Memory and speed of one setup as it stands."""
        setup = words_of(method=method, seq_len=seq_len, micro_batch=micro_batch, accumulation=accumulation, rank=rank)
        setup += words_of(quantization=quantization, checkpointing=checkpointing, optimizer=optimizer)
        setup += words_of(gpu=gpu, attention=attention, gpus=num_gpus)
        return self._desk.ask("estimate", self._desk.name(model), *setup)

    def check(
        self,
        gpu: Gpu,
        path: Annotated[str | None, Field(description="training config, script, notebook or launch script")] = None,
        text: Annotated[str | None, Field(description="its text instead", max_length=1_000_000)] = None,
        file_name: Annotated[
            str, Field(description="of the text: its ending decides", pattern=r"^[\w.-]+$")
        ] = "a.yaml",
        model: Annotated[str | None, Field(description="where the file does not name it")] = None,
    ) -> dict[str, Any]:
        """Whether an existing config fits, and which single changes would make it fit or faster. Executes nothing."""
        if (path is None) == (text is None):
            raise refusal("either path or text")
        more = words_of(gpu=gpu, model=None if model is None else self._desk.name(model))
        if path is not None:
            return self._desk.ask("check", self._desk.path(path), *more)
        return self._desk.ask("check", f"./{file_name}", *more, files={file_name: text or ""})

    def which_gpu(
        self, model: Model, seq_len: Tokens = None, method: Method = None, num_gpus: Count = None, fitting: bool = True
    ) -> dict[str, Any]:
        """The cards that can fine-tune a model, the smallest first, with speed and price."""
        more = words_of(seq_len=seq_len, method=method, gpus=num_gpus)
        return self._desk.ask("which-gpu", self._desk.name(model), *more, *(["--fitting"] if fitting else []))

    def which_model(
        self,
        gpu: Gpu,
        match: Annotated[str | None, Field(description="only models whose names contain this")] = None,
        seq_len: Tokens = None,
    ) -> dict[str, Any]:
        """What a card can fine-tune, up to which length, how fast."""
        named = [self._desk.name(match)] if match else []
        return self._desk.ask("which-model", *named, *words_of(gpu=gpu, seq_len=seq_len))

    def oom(
        self,
        text: Annotated[str, Field(description="traceback or log with the out-of-memory error", max_length=2_000_000)],
        gpu: Annotated[str | None, Field(description="its card, where the message does not tell")] = None,
        config: Annotated[str | None, Field(description="the run's config or script, a path")] = None,
    ) -> dict[str, Any]:
        """Why a run ran out of memory, and the smallest change."""
        more = words_of(gpu=gpu, config=None if config is None else self._desk.path(config))
        return self._desk.ask("oom", "log.txt", *more, files={"log.txt": text})

    def explain(self, word: Annotated[str, Field(description="a word of a plan: chunked loss, LoRA, ...")]) -> str:
        """What a word of a plan means."""
        return self._desk.say("explain", *(["--"] if word.startswith("-") else []), word)

    def details(
        self,
        handle: Annotated[str, Field(description="of an earlier answer")],
        path: Annotated[str, Field(description="dotted: chosen.formula, alternatives.0; empty: the top")] = "",
    ) -> dict[str, Any]:
        """A part of an earlier answer that was left out of it."""
        return self._desk.details(handle, path)

    def trace(
        self,
        gpu: Gpu,
        script: Annotated[str, Field(description="a Python program; it IS EXECUTED, on copies of the files")],
        arguments: Annotated[list[str] | None, Field(description="its command line")] = None,
    ) -> dict[str, Any]:
        """Runs a training program on a GPU that computes nothing, and says what it needs and why."""
        file = self._desk.path(script)
        return self._desk.ask("trace", *words_of(gpu=gpu), "--", "python", file, *(arguments or []))
