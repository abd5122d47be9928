"""torchtitan's configs as Python functions (`torchtitan.train --module llama3 --config llama3_8b`), never executed.

Source: pytorch/torchtitan `torchtitan/models/*/config_registry.py`, `torchtitan/config/configs.py`, November 2026.
"""

import ast
from dataclasses import replace
from typing import Any

from planner.errors import NotATraining, Undetermined
from planner.readers import schema, torchtitan, training
from planner.readers.outside import Sharding
from planner.readers.program import Function, Made, Reader
from planner.readers.program.values import Value
from planner.readers.shell import flags
from planner.readers.types import Missing, ReadConfig
from planner.readers.values import Settings

TOKENS, CONTEXT, STEP = "num_tokens_per_microbatch_per_dp_rank", "max_context_length", "num_tokens_per_train_step"
DEFAULTS = {TOKENS: 16384, CONTEXT: 2048}
BLOCKS = ("training", "parallelism", "compile")


def is_registry(text: str) -> bool:
    """Whether a program is a file of torchtitan configs."""
    return "torchtitan" in text and "-> Trainer.Config:" in text


def read(text: str, name: str, outside: Sharding) -> ReadConfig:
    """The setup of one config of a registry: the one that `--config` names, else the only one.

    Raises:
        ConfigError: none in it, or several and none is named.
    """
    tree = ast.parse(text)
    reader = Reader(name, replace(outside.of_program(), read=lambda _: None))  # torchtitan's own classes stay calls
    reader.whole(tree)
    found = {
        node.name: reader.program.module.names.get(node.name)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) == "Trainer.Config"
    }
    words = flags(outside.arguments or ())
    wanted = words.get("config") or (next(iter(found)) if len(found) == 1 else "")
    function = found.get(str(wanted))
    if not isinstance(function, Function):
        if wanted or not found:
            raise NotATraining(
                f"{name} has no config {wanted or 'at all'}", hint=f"it has {', '.join(found) or 'none'}"
            )
        raise Undetermined(
            f"{name} holds {len(found)} configs: {', '.join(found)}", hint=f'add --args "--config {next(iter(found))}"'
        )
    made = reader.called(function, Made("", where=name))
    if not isinstance(made, Made):
        raise Undetermined(f"{name}: what {wanted} returns is not known without running it", hint="name another config")
    return _read(made, words, name, outside)


def _block(made: Made, words: dict[str, Any], name: str, title: str) -> Settings:
    """A block's settings, the command line's on top."""
    found = training.settings(made.argument(title), f"{name}: {title}")
    said = {key.partition(".")[2]: value for key, value in words.items() if key.startswith(f"{title}.")}
    found.values = {**found.values, **said}
    return found


def _read(made: Made, words: dict[str, Any], name: str, outside: Sharding) -> ReadConfig:
    """One config as torchtitan's TOML is read."""
    blocks, known = {title: _block(made, words, name, title) for title in BLOCKS}, schema.known(torchtitan.FORMAT)
    context = blocks["training"].integer(CONTEXT, DEFAULTS[CONTEXT], at_least=1)
    tokens = blocks["training"].integer(TOKENS, DEFAULTS[TOKENS], at_least=1)
    total = int(blocks["training"].real(STEP, -1))
    document: dict[str, dict[str, Any]] = {
        title: {key: value for key, value in settings.values.items() if f"{title}.{key}" in known}
        for title, settings in blocks.items()
    }
    document["training"] |= {"seq_len": context, "local_batch_size": max(1, tokens // context)}
    document["training"] |= {"global_batch_size": total // context} if total > 0 else {}
    document["activation_checkpoint"] = _checkpointing(made.argument("activation_checkpoint"))
    assets = training.settings(made, name).raw("hf_assets_path")
    document["model"] = {"hf_assets_path": assets} if isinstance(assets, str) else {}
    found = torchtitan.read(Settings(document, name, outside))
    loss = made.argument("loss")
    if isinstance(loss, Made) and loss.owner.startswith("Chunked"):
        found = replace(found, setup=found.setup.with_(loss="chunked"))
    missing = {
        field: settings.undetermined[key]
        for settings in blocks.values()
        for key, field in ((CONTEXT, "seq_len_tokens"), (TOKENS, "micro_batch_seqs"), (STEP, "accumulation_steps"))
        if key in settings.undetermined
    }
    if not isinstance(assets, str) or "tokenizer" in assets:
        missing["model"] = f"{made.where}: hf_assets_path names no model"
    named = None if "model" in missing else found.model_id
    return replace(found, model_id=named, missing=tuple(Missing(field=of, reason=why) for of, why in missing.items()))


def _checkpointing(given: Value | None) -> dict[str, Any]:
    """The mode of activation checkpointing: an object of a class, None, or absent (selective by operation)."""
    if isinstance(given, Made) and given.owner == "FullAC":
        return {"mode": "full"}
    if given is not None and not isinstance(given, Made):
        return {"mode": "none"}
    return {"mode": "selective", "selective_ac_option": "op"}
